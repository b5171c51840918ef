"""The store in which workers meet: each kind of it, and where it listens."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore

import zrpc.membership.store
from tests.support.waiting import until
from tests.transport.two_hosts import namespaces
from zrpc.errors import RendezvousError
from zrpc.launch import Task
from zrpc.membership.signed_store import SignedStore
from zrpc.membership.store import connect_store
from zrpc.testing.server import warm_server

SOON = 10.0


@pytest.mark.parametrize("scheme", ["tcp", "env", "file"])
def test_a_store_of_each_kind(
    free_port: int, monkeypatch: pytest.MonkeyPatch, scheme: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    url = {
        "tcp": f"tcp://127.0.0.1:{free_port}",
        "env": "env://",
        "file": f"file://{tmp_path}/store",
    }[scheme]
    with ThreadPoolExecutor() as threads:
        futures = [threads.submit(connect_store, url, rank, 2, 2.0) for rank in (0, 1)]
        stores = [future.result() for future in futures]
    stores[1].set_timeout(timedelta(seconds=SOON))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_ranks_in_the_url_are_ignored(tmp_path: Path) -> None:
    store = connect_store(f"file://{tmp_path}/store?rank=0&world_size=1", 0, 1, SOON)
    store.set("key", "value")


@pytest.mark.system
def test_a_host_without_loopback_is_told_so_at_once(free_port: int) -> None:
    def host_the_store(namespace: str) -> None:
        with open(f"/run/netns/{namespace}") as file:
            assert not ctypes.CDLL(None).setns(file.fileno(), 0)  # this thread, and those it starts
        connect_store(f"tcp://127.0.0.1:{free_port}", 0, 2, 3600.0)

    # The loopback interface of a new namespace is down.
    with namespaces(1) as [name], ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(host_the_store, name)
        with pytest.raises(RendezvousError, match=r"not reach itself .* loopback interface must"):
            waiting.result(timeout=30.0)


@pytest.mark.system
def test_a_worker_without_a_rank_that_finds_no_store_is_told_who_hosts_it(free_port: int) -> None:
    with pytest.raises(RendezvousError, match=r"found nobody .* this worker was given no rank"):
        connect_store(f"tcp://127.0.0.1:{free_port}", None, None, 0.1)


@pytest.mark.system
def test_a_missing_master_is_named(free_port: int) -> None:
    begun = time.monotonic()
    with pytest.raises(
        RendezvousError, match=f"at 127.0.0.1:{free_port} within 0.2 s, found nobody"
    ):
        connect_store(f"tcp://127.0.0.1:{free_port}", 1, 2, 0.2)
    assert time.monotonic() - begun < SOON  # torch's own wait has a minimum of minutes


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("env://", "MASTER_ADDR"),
        ("nonsense://x", r"nonsense.*expected env://"),
        ("tcp://127.0.0.1", "port"),
    ],
)
def test_an_incomplete_or_unknown_url(monkeypatch: pytest.MonkeyPatch, url: str, told: str) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RendezvousError, match=told):
        connect_store(url, 0, 2, 1.0)


@pytest.mark.system
def test_a_missing_directory(tmp_path: Path) -> None:
    # In a process of its own, which can be killed: torch's FileStore would retry for minutes.
    connect = Task.function(
        "zrpc.membership.store:connect_store", "file:///is/missing/store", 0, 1, 0.5
    )
    output = tmp_path / "output"
    with output.open("wb") as stream:
        pid = warm_server().spawn(connect, stderr=stream.fileno())
    try:
        assert warm_server().wait(pid, 2 * SOON) == 1
    finally:
        warm_server().send_signal(pid, signal.SIGKILL)
    assert "RendezvousError" in output.read_text()
    assert "/is/missing" in output.read_text()


# -- where it listens ----------------------------------------------------------------------


def listens_at(port: int) -> list[str]:
    """Returns the local addresses, in the kernel's notation, with a listener on a port."""
    found = []
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(name) as file:
            rows = [line.split() for line in file][1:]
        local = [row[1].split(":") for row in rows if row[3] == "0A"]
        found += [address for address, number in local if int(number, 16) == port]
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="needs /proc")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_listens_on_its_address_only(free_port: int, host: str) -> None:
    store = connect_store(f"tcp://{host}:{free_port}", 0, 2, SOON)
    assert listens_at(free_port) == ["0100007F"]
    other = connect_store(f"tcp://{host}:{free_port}", 1, 2, SOON)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_of_an_older_torch_listens_on_its_address_only(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*args: Any, master_listen_fd: int | None, use_libuv: bool = True, **kw: Any) -> Any:
        if use_libuv and master_listen_fd is not None:  # as torch 2.6
            raise NotImplementedError("libuv TCPStore does not support a listen fd")
        return TCPStore(*args, master_listen_fd=master_listen_fd, use_libuv=use_libuv, **kw)

    monkeypatch.setattr(zrpc.membership.store, "TCPStore", make)
    test_the_store_listens_on_its_address_only(free_port, "127.0.0.1")


@pytest.mark.parametrize("cause", [RuntimeError, DistNetworkError])
def test_a_port_that_is_in_use_is_named_by_each_torch(
    free_port: int, monkeypatch: pytest.MonkeyPatch, cause: type[Exception]
) -> None:
    def make(*_: Any, master_listen_fd: int, **__: Any) -> Any:
        os.close(master_listen_fd)  # the store owns it
        raise cause("code: -98, name: EADDRINUSE")

    monkeypatch.setattr(zrpc.membership.store, "TCPStore", make)
    with pytest.raises(RendezvousError, match="found that address in use"):
        connect_store(f"tcp://127.0.0.1:{free_port}", 0, 2, SOON)


class Occupant:
    """Another program at a port: what it does with each connection is a function's choice."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._serve = serve
        self._accepted: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._accepted.append(self._listener.accept()[0])
                self._serve(self._accepted[-1])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        for each in self._accepted:
            each.close()


def no_answer(connection: socket.socket) -> None:
    pass


def hang_up(connection: socket.socket) -> None:
    connection.close()


def greet(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


@pytest.mark.system
@pytest.mark.parametrize("serve", [no_answer, hang_up, greet])
def test_a_port_of_another_program_is_named_by_all_ranks(
    serve: Callable[[socket.socket], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(Occupant(serve)) as other:
        url = f"tcp://127.0.0.1:{other.port}"
        with pytest.raises(RendezvousError, match="found that address in use") as of_host:
            connect_store(url, 0, 2, SOON)
        with pytest.raises(RendezvousError, match="does not answer as one") as of_client:
            connect_store(url, 1, 2, 0.5)
    for error in (of_host, of_client):
        assert f"127.0.0.1:{other.port}" in str(error.value)
        assert "Name a port that is free in MASTER_PORT" in str(error.value)
    assert capfd.readouterr().err == ""  # no stack of C++ frames


@pytest.mark.system
@pytest.mark.parametrize("rank", [0, 1])
def test_a_master_with_an_unknown_name(rank: int) -> None:
    with pytest.raises(
        RendezvousError, match=r"no host of that name .*: check MASTER_ADDR"
    ) as info:
        connect_store("tcp://no-such-host.invalid:29500", rank, 2, 0.2)
    assert "no-such-host.invalid:29500" in str(info.value)


def test_a_master_behind_a_firewall() -> None:
    """A listener whose backlog is full answers as little as one behind a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address), pytest.raises(RendezvousError) as info:
            connect_store(f"tcp://127.0.0.1:{address[1]}", 1, 2, 0.1)
    where = f"at 127.0.0.1:{address[1]} within 0.1 s, found no answer (timed out)"
    assert where in str(info.value)
    assert f"firewalls on the way let TCP port {address[1]} pass" in str(info.value)


@pytest.mark.parametrize(
    ("host", "advice"),
    [
        ("127.0.0.1", r"there \(Network is unreachable\): its loopback interface"),
        ("192.0.2.1", r"does not \(Network is unreachable\): MASTER_ADDR"),
    ],
)
def test_a_master_that_does_not_reach_itself(
    free_port: int, monkeypatch: pytest.MonkeyPatch, host: str, advice: str
) -> None:
    def connect(*_: Any) -> socket.socket:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RendezvousError, match=advice):
        connect_store(f"tcp://{host}:{free_port}", 0, 1, 0.2)
    until(lambda: not [each for each in threading.enumerate() if each.name == "zrpc-store"])


def test_a_second_store_of_one_process_is_the_first(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    stores = [connect_store(f"tcp://127.0.0.1:{free_port}", 0, 1, SOON) for _ in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_the_port_is_free_again_after_the_store(free_port: int) -> None:
    connect_store(f"tcp://127.0.0.1:{free_port}", 0, 1, SOON)
    gc.collect()  # stores of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        connect_store(f"tcp://127.0.0.1:{free_port}", 0, 1, SOON)
        assert listens_at(free_port) == []
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("found", [["192.0.2.1"], ["127.0.1.1"], ["127.0.0.1", "127.0.0.2"]])
def test_an_ambiguous_address_is_left_to_torch(
    free_port: int, monkeypatch: pytest.MonkeyPatch, found: list[str]
) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(zrpc.membership.store.socket, "getaddrinfo", resolve)
    assert zrpc.membership.store._listen("master", free_port) is None


def test_a_host_that_is_gone_leaves_no_stack_of_torch_on_the_terminal(
    free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """But the program's own use of a store does."""
    host = TCPStore("127.0.0.1", free_port, None, True, wait_for_workers=False)
    store = connect_store(f"tcp://127.0.0.1:{free_port}", 1, 2, SOON)
    entries = SignedStore(store, None)
    entries.set("key", "value")
    del host
    with pytest.raises(DistNetworkError):
        until(lambda: not entries.check(["key"]))
    assert capfd.readouterr().err == ""
    with pytest.raises(DistNetworkError):
        store.check(["key"])
    assert "failed" in capfd.readouterr().err
