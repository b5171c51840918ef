"""The store in which workers meet: each kind of it, where it listens, and one that is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, Store, TCPStore

import zrpc.membership.store
from tests.support.listeners import listeners
from tests.support.records import peer_record
from tests.support.waiting import SOON, until
from tests.transport.two_hosts import namespaces
from zrpc.errors import RendezvousError
from zrpc.launch import Task
from zrpc.membership.rendezvous import meet
from zrpc.membership.signed_store import SignedStore
from zrpc.membership.store import connect_store
from zrpc.membership.store_request import ask
from zrpc.testing.procfs import state_of
from zrpc.testing.server import warm_server


def test_a_store_of_each_kind(
    free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    # Ranks in the URL are ignored.
    of_file = f"file://{tmp_path}/store?rank=0&world_size=1"
    for url in (f"tcp://127.0.0.1:{free_port}", "env://", of_file):
        with ThreadPoolExecutor() as threads:
            futures = [threads.submit(connect_store, url, rank, 2, 2.0) for rank in (0, 1)]
            stores = [future.result() for future in futures]
        stores[1].set_timeout(timedelta(seconds=SOON))
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
        del stores, futures


@pytest.mark.system
@pytest.mark.parametrize(
    ("host", "advice"),
    [
        ("127.0.0.1", r"does not reach itself there .*unreachable\): its loopback interface must"),
        ("192.0.2.1", r"this process does not .*unreachable\): MASTER_ADDR, or"),
    ],
    ids=["no loopback", "another address"],
)
def test_a_master_that_does_not_reach_itself_is_told_so(
    free_port: int, host: str, advice: str
) -> None:
    def host_the_store(namespace: str) -> None:
        with open(f"/run/netns/{namespace}") as file:
            assert not ctypes.CDLL(None).setns(file.fileno(), 0)  # this thread, and those it starts
        timeout = 3600.0 if host == "127.0.0.1" else 0.2  # nobody waits for a loopback interface
        connect_store(f"tcp://{host}:{free_port}", 0, 2, timeout)

    # The loopback interface of a new namespace is down.
    with namespaces(1) as [name], ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(host_the_store, name)
        with pytest.raises(RendezvousError, match=advice):
            waiting.result(timeout=30.0)
    until(lambda: not [each for each in threading.enumerate() if each.name == "zrpc-store"])


@pytest.mark.system
def test_a_missing_master_is_named(free_port: int) -> None:
    url, begun = f"tcp://127.0.0.1:{free_port}", time.monotonic()
    with pytest.raises(
        RendezvousError, match=f"at 127.0.0.1:{free_port} within 0.2 s, found nobody"
    ):
        connect_store(url, 1, 2, 0.2)
    assert time.monotonic() - begun < SOON  # torch's own wait has a minimum of minutes
    with pytest.raises(RendezvousError, match=r"found nobody .* this worker was given no rank"):
        connect_store(url, None, None, 0.1)


def test_an_incomplete_or_unknown_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for url, told in (
        ("env://", "MASTER_ADDR"),
        ("nonsense://x", r"nonsense.*expected env://"),
        ("tcp://127.0.0.1", "port"),
    ):
        with pytest.raises(RendezvousError, match=told):
            connect_store(url, 0, 2, 1.0)


@pytest.mark.system
@pytest.mark.parametrize(
    ("file", "size", "told"),
    [
        ("/is/missing/store", 1, "found none: make /is/missing"),
        ("dangling", None, "No such file or directory"),
        ("locked", None, "within 0.5 s, found it locked by another program"),
        ("notes", None, "with other contents, or only a part"),
        ("cut", None, "with other contents, or only a part"),
    ],
    ids=["missing", "dangling", "locked", "notes", "cut"],
)
def test_a_file_that_cannot_be_opened_locked_or_read(
    tmp_path: Path, file: str, size: int | None, told: str
) -> None:
    (tmp_path / "dangling").symlink_to("/is/missing/store")
    (tmp_path / "notes").write_text("do not forget the milk")
    (tmp_path / "cut").write_bytes(struct.pack("=I", 3) + b"ke")
    # In a process of its own, which can be killed: torch's FileStore would retry for minutes, and
    # let no other thread run.
    url = f"file://{tmp_path / file}"
    connect = Task.function("zrpc.membership.store:connect_store", url, 0, size, 0.5)
    output = tmp_path / "output"
    with output.open("wb") as stream, (tmp_path / "locked").open("wb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        pid = warm_server().spawn(connect, stderr=stream.fileno())
        try:
            assert warm_server().wait(pid, 2 * SOON) == 1
        finally:
            warm_server().send_signal(pid, signal.SIGKILL)
    assert "RendezvousError" in output.read_text()
    assert told in output.read_text()


# -- where it listens ----------------------------------------------------------------------


def listens_at(port: int) -> list[str]:
    """Returns the local addresses, in the kernel's notation, with a listener on a port."""
    return [address for address, number in listeners() if number == port]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_listens_on_its_address_only(free_port: int, host: str) -> None:
    store = connect_store(f"tcp://{host}:{free_port}", 0, 2, SOON)
    assert listens_at(free_port) == ["0100007F"]
    # A worker of this process may host it too, and then gets the same.
    for rank in (0, 1):
        other = connect_store(f"tcp://{host}:{free_port}", rank, 2, SOON)
        other.set(f"key{rank}", "value")
        assert store.get(f"key{rank}") == b"value"


def test_a_store_of_an_older_torch_listens_on_its_address_only(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*args: Any, master_listen_fd: int | None, use_libuv: bool = True, **kw: Any) -> Any:
        if use_libuv and master_listen_fd is not None:  # as torch 2.6
            raise NotImplementedError("libuv TCPStore does not support a listen fd")
        return TCPStore(*args, master_listen_fd=master_listen_fd, use_libuv=use_libuv, **kw)

    monkeypatch.setattr(zrpc.membership.store, "TCPStore", make)
    test_the_store_listens_on_its_address_only(free_port, "127.0.0.1")


def test_a_port_that_is_in_use_is_named_by_an_older_torch(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: Any, master_listen_fd: int, **__: Any) -> Any:
        os.close(master_listen_fd)  # the store owns it
        raise RuntimeError("code: -98, name: EADDRINUSE")  # no DistNetworkError, as torch 2.6

    monkeypatch.setattr(zrpc.membership.store, "TCPStore", make)
    with pytest.raises(RendezvousError, match="found that address in use"):
        connect_store(f"tcp://127.0.0.1:{free_port}", 0, 2, SOON)


@contextlib.contextmanager
def occupant(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Another program at a port: what it does with each connection is a function's choice."""
    accepted = []

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])
                serve(accepted[-1])

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        thread.submit(run)
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    for each in accepted:
        each.close()


@pytest.mark.system
@pytest.mark.parametrize(
    "serve",
    [lambda _: None, socket.socket.close, lambda each: each.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")],
    ids=["no answer", "hang up", "greet"],
)
def test_a_port_of_another_program_is_named_by_all_ranks(
    serve: Callable[[socket.socket], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with occupant(serve) as port:
        url = f"tcp://127.0.0.1:{port}"
        with pytest.raises(RendezvousError, match="found that address in use") as of_host:
            connect_store(url, 0, 2, SOON)
        with pytest.raises(RendezvousError, match="does not answer as one") as of_client:
            connect_store(url, 1, 2, 0.5)
    for error in (of_host, of_client):
        assert f"127.0.0.1:{port}" in str(error.value)
        assert "Name a port that is free in MASTER_PORT" in str(error.value)
    assert capfd.readouterr().err == ""  # no stack of C++ frames


@pytest.mark.system
def test_a_master_with_an_unknown_name() -> None:
    for rank in (0, 1):
        told = r"at no-such-host.invalid:29500 .* no host of that name .*: check MASTER_ADDR"
        with pytest.raises(RendezvousError, match=told):
            connect_store("tcp://no-such-host.invalid:29500", rank, 2, 0.2)


def test_a_master_behind_a_firewall() -> None:
    """A listener whose backlog is full answers as little as one behind a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address), pytest.raises(RendezvousError) as info:
            connect_store(f"tcp://127.0.0.1:{address[1]}", 1, 2, 0.1)
    where = f"at 127.0.0.1:{address[1]} within 0.1 s, found no answer (timed out)"
    assert where in str(info.value)
    assert f"firewalls on the way let TCP port {address[1]} pass" in str(info.value)


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
    assert zrpc.membership.store.open_listener("master", free_port) is None


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


# -- whose host is stopped ---------------------------------------------------------------------


class StoreHost:
    """Another process that hosts the store."""

    def __init__(self, port: int) -> None:
        self._port = port
        serve = "zrpc.membership.store_server:serve"
        with open(os.devnull, "wb") as nowhere:
            report = 1  # what it writes to its standard output
            task = Task.function(serve, "127.0.0.1", port, True, 1, report)
            self._pid = warm_server().spawn(task, stdout=nowhere.fileno())

    def connect(self) -> Store:
        return connect_store(f"tcp://127.0.0.1:{self._port}", 1, 2, SOON)

    def stop(self) -> None:
        warm_server().send_signal(self._pid, signal.SIGSTOP)
        threads = Path(f"/proc/{self._pid}/task")
        until(lambda: all(state_of(int(thread.name)) == "T" for thread in threads.iterdir()))

    def close(self) -> None:
        warm_server().send_signal(self._pid, signal.SIGKILL)
        warm_server().wait(self._pid, SOON)


@pytest.fixture
def host(free_port: int) -> Iterator[StoreHost]:
    with contextlib.closing(StoreHost(free_port)) as host:
        yield host


@pytest.mark.system
def test_a_rendezvous_whose_store_falls_silent_ends_at_its_deadline(host: StoreHost) -> None:
    entries = SignedStore(host.connect(), None)
    stopper = threading.Thread(target=lambda: (entries.get("record/-/1"), host.stop()))
    stopper.start()  # it waits for the record
    with pytest.raises(RendezvousError, match=r"found no answer .* or the network to it is cut"):
        meet(host.connect(), peer_record(1, 2), 3.0)
    stopper.join()


@pytest.mark.system
def test_ctrl_c_ends_the_wait(host: StoreHost) -> None:
    store = host.connect()
    host.stop()
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        meet(store, peer_record(0, 2), 60)
    assert time.monotonic() - began < SOON
    interrupt.join()


def test_an_answer_is_not_kept() -> None:
    class Answer:
        pass

    answer = weakref.ref(ask(Answer, time.monotonic() + SOON))
    gc.collect()
    assert answer() is None


@pytest.mark.system
@pytest.mark.usefixtures("no_leaks")
def test_a_request_without_an_answer_holds_up_no_other() -> None:
    answer, threads = threading.Event(), []

    def silent() -> None:
        threads.append(threading.current_thread())
        answer.wait()

    with pytest.raises(RendezvousError, match="found no answer for"):
        ask(silent, time.monotonic())
    assert ask(int, time.monotonic() + SOON) == 0
    answer.set()  # then its thread ends, too
    threads[0].join(SOON)
    assert not threads[0].is_alive()
