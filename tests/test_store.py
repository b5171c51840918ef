"""The store in which workers meet: each kind of it, where it is, and where it listens."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import zrpc.store
from zrpc.errors import RendezvousError
from zrpc.launch import Task
from zrpc.store import connect_store
from zrpc.testing.server import warm_server

SOON = 10.0


def free_port():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port  # closed with the store


@pytest.mark.parametrize("scheme", ["tcp", "env", "file"])
def test_a_store_of_each_kind(monkeypatch, scheme, tmp_path):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    url = {
        "tcp": f"tcp://127.0.0.1:{port}",
        "env": "env://",
        "file": f"file://{tmp_path}/store",
    }[scheme]
    with ThreadPoolExecutor() as threads:
        futures = [threads.submit(connect_store, url, rank, 2, 2.0) for rank in (0, 1)]
        stores = [future.result() for future in futures]
    stores[1].set_timeout(timedelta(seconds=SOON))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


def test_ranks_in_the_url_do_not_disturb(tmp_path):
    store = connect_store(f"file://{tmp_path}/store?rank=0&world_size=1", 0, 1, SOON)
    store.set("key", "value")


def test_a_master_that_is_not_there_is_named():
    port = free_port()
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match=f"at 127.0.0.1:{port} within 0.2 s, found nobody"):
        connect_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.2)
    assert time.monotonic() - begun < SOON  # torch's own wait has a minimum of minutes


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("env://", "MASTER_ADDR"),
        ("nonsense://x", "nonsense"),
        ("tcp://127.0.0.1", "port"),
    ],
)
def test_a_url_that_leads_nowhere(monkeypatch, url, told):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RendezvousError, match=told):
        connect_store(url, 0, 1, 1.0)


def test_a_directory_that_is_missing(tmp_path):
    # In a process of its own, which can be killed: torch's FileStore would try for minutes.
    connect = Task.function("zrpc.store:connect_store", "file:///is/missing/store", 0, 1, 0.5)
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


def listens_at(port):
    """The local addresses, in the kernel's notation, at which anybody listens on a port."""
    found = []
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(name) as file:
            rows = [line.split() for line in file][1:]
        local = [row[1].split(":") for row in rows if row[3] == "0A"]
        found += [address for address, number in local if int(number, 16) == port]
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="needs /proc")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_listens_at_its_address_only(host):
    port = free_port()
    store = connect_store(f"tcp://{host}:{port}", 0, 2, SOON)
    assert listens_at(port) == ["0100007F"]
    other = connect_store(f"tcp://{host}:{port}", 1, 2, SOON)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_that_is_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}, found that address in use"):
            connect_store(f"tcp://127.0.0.1:{port}", 0, 2, SOON)


def test_a_second_store_of_one_process_is_the_first(caplog):
    port = free_port()
    stores = [connect_store(f"tcp://127.0.0.1:{port}", 0, 1, SOON) for _ in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_the_port_is_free_again_after_the_store():
    port = free_port()
    connect_store(f"tcp://127.0.0.1:{port}", 0, 1, SOON)
    gc.collect()  # stores of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        connect_store(f"tcp://127.0.0.1:{port}", 0, 1, SOON)
        assert listens_at(port) == []
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("found", [["192.0.2.1"], ["127.0.1.1"], ["127.0.0.1", "127.0.0.2"]])
def test_where_the_address_says_nothing_the_store_is_left_to_torch(monkeypatch, found):
    def resolve(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(zrpc.store.socket, "getaddrinfo", resolve)
    assert zrpc.store._listen("master", free_port()) is None
