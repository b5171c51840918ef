"""Who listens where, and which meshes are refused because nobody could be trusted."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch

import zrpc
import zrpc.endpoints
import zrpc.joining
from zrpc.api import start_agent
from zrpc.errors import AuthenticationError, RpcError
from zrpc.options import ZmqRpcBackendOptions
from zrpc.secret import ClusterSecret, new_secret
from zrpc.testing import local_mesh
from zrpc.testing.leaks import lasting

pytestmark = pytest.mark.usefixtures("no_leaks")

SOON = 10.0
SECRET = ClusterSecret(new_secret())


@pytest.fixture(autouse=True)
def _no_secret_around(monkeypatch):
    for name in ("ZRPC_SECRET", "ZRPC_SECRET_FILE", "ZRPC_IFACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hosts(monkeypatch):
    """Makes each worker see a host of its own."""
    monkeypatch.setattr(zrpc.joining, "host_key", lambda: threading.current_thread().name)


class Started:
    """Agents, each started in a thread that is named for its host; or their errors."""

    def __init__(self, *options, secret=SECRET, size=None):
        with lasting():
            import torch.distributed as dist
        self.outcomes = [None] * len(options)
        self._store, self._secret = dist.HashStore(), secret
        threads = [
            threading.Thread(target=self._start, args=(rank, chosen), name=f"boot{rank}/dir")
            for rank, chosen in enumerate(options)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SOON)
            assert not thread.is_alive()

    def _start(self, rank, options):
        try:
            self.outcomes[rank] = start_agent(
                f"w{rank}",
                rank=rank,
                world_size=len(self.outcomes),
                store=self._store,
                options=ZmqRpcBackendOptions(**{"init_timeout": SOON, **options}),
                secret=self._secret,
            )
        except Exception as error:
            self.outcomes[rank] = error

    def __enter__(self):
        return self.outcomes

    def __exit__(self, *_):
        for outcome in self.outcomes:
            if not isinstance(outcome, Exception):
                outcome.close()


def talk(agents):
    with agents[0].as_current():
        assert zrpc.rpc_sync(1, torch.add, (torch.ones(3), 1)).tolist() == [2, 2, 2]
    with agents[1].as_current():
        assert zrpc.rpc_sync(0, max, (1, 2)) == 2


def listeners():
    """The local addresses and ports on which this process listens for tcp."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
    found = set()
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(name) as file:
            rows = [line.split() for line in file][1:]
        found |= {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    return found


# -- one host ------------------------------------------------------------------------------


@pytest.mark.parametrize("security", ["auto", "none"])
def test_one_host_needs_no_secret(security):
    before = listeners()
    with Started({"security": security}, {"security": security}, secret=None) as agents:
        talk(agents)
        assert listeners() == before


def test_a_secret_can_be_required_of_one_host_too():
    with Started({"security": "required"}, {"security": "required"}, secret=None) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "security='required' needs a cluster secret: make a file" in str(error)
    with Started({"security": "required"}, {"security": "auto"}) as agents:
        talk(agents)


@pytest.mark.parametrize("security", ["auto", "required"])
def test_tcp_without_a_secret_is_refused_on_one_host_too(security):
    options = {"transport": "tcp", "security": security}
    with Started(options, options, secret=None) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "zrpc secret" in str(error)


def test_a_worker_alone_needs_nothing():
    with Started({"transport": "tcp"}, secret=None) as [agent], agent.as_current():
        assert zrpc.rpc_sync(0, max, (1, 2)) == 2
        assert agent._network._gatekeeper is None


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="needs /proc")
@pytest.mark.parametrize("security", ["auto", "required", "none"])
def test_tcp_on_one_host_listens_on_loopback_only(security):
    before = listeners()
    options = {"transport": "tcp", "security": security}
    with Started(options, options) as agents:
        talk(agents)
        assert listeners() - before == {"0100007F"}
        guarded = [agent._network._gatekeeper is not None for agent in agents]
        assert guarded == [security != "none"] * 2


def test_plain_tcp_needs_no_secret_but_is_told_aloud(caplog):
    options = {"transport": "tcp", "security": "none"}
    with Started(options, options, secret=None) as agents:
        talk(agents)
    warnings = [r for r in caplog.records if "neither encrypted nor authenticated" in r.message]
    assert len(warnings) == 2
    assert all(record.levelname == "WARNING" for record in warnings)


def test_workers_must_agree_about_none():
    with Started({"transport": "tcp", "security": "none"}, {"transport": "tcp"}) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "WorkerInfo(id=0, name=w0) talks in the clear" in str(error)
            assert "but WorkerInfo(id=1, name=w1) does not" in str(error)


def test_an_unknown_security():
    with pytest.raises(ValueError, match="'auto', 'required' or 'none', but got 'some'"):
        ZmqRpcBackendOptions(security="some")


def test_a_mesh_of_the_test_fixture_has_a_secret():
    with local_mesh(2, options={"transport": "tcp"}) as mesh:
        assert mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2)) == 2


@pytest.mark.parametrize("security", ["auto", "required", "none"])
def test_a_libzmq_that_can_not_encrypt(monkeypatch, security):
    monkeypatch.setattr(zrpc.endpoints, "supports_curve", lambda: False)
    with Started({"security": security}, {"security": security}) as outcomes:
        if security == "none":
            talk(outcomes)
        else:
            assert all("install pyzmq from its wheels" in str(error) for error in outcomes)


# -- several hosts -------------------------------------------------------------------------


@pytest.mark.usefixtures("hosts")
def test_several_hosts_without_a_secret_are_told_what_to_do():
    with Started({}, {}, secret=None) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "they are on 2 host(s)" in str(error)
            assert "make a file with `zrpc secret FILE`, copy it to each host" in str(error)
            assert "ZRPC_SECRET_FILE" in str(error)


@pytest.mark.usefixtures("hosts")
def test_an_address_that_other_hosts_can_not_reach_is_told():
    with Started({}, {}) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert "listens on tcp://127.0.0.1:" in str(error)
            assert "set ZRPC_IFACE there" in str(error)


@pytest.mark.usefixtures("hosts")
def test_ipc_only_between_hosts_is_refused():
    with Started({"transport": "ipc"}, {"transport": "ipc"}) as outcomes:
        assert all("transport='ipc' needs all workers on one" in str(error) for error in outcomes)


# -- interfaces ----------------------------------------------------------------------------


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1", " 127.0.0.1 "])
def test_an_interface_can_be_named(monkeypatch, interface):
    monkeypatch.setenv("ZRPC_IFACE", interface)
    before = listeners()
    with Started({"transport": "tcp"}, {"transport": "tcp"}) as agents:
        talk(agents)
        assert listeners() - before == {"0100007F"}


@pytest.mark.parametrize("interface", ["*", "0.0.0.0", "::", "[::]"])
def test_all_interfaces_are_refused(monkeypatch, interface):
    monkeypatch.setenv("ZRPC_IFACE", interface)
    with Started({"transport": "tcp"}, {"transport": "tcp"}) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert "never listens on all of them" in str(error)


@pytest.mark.parametrize("interface", ["nosuchthing0", "203.0.113.7", "a b"])
def test_an_interface_that_is_not_there(monkeypatch, interface):
    monkeypatch.setenv("ZRPC_IFACE", interface)
    with Started({"transport": "tcp"}, {"transport": "tcp"}) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert f"can't listen on {interface} (" in str(error)
            assert "set ZRPC_IFACE to the name or the address" in str(error)


# -- forged cards --------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs another user")
def test_a_directory_of_another_user_is_not_connected_to(monkeypatch):
    real = zrpc.joining.meet

    def meet(*args):
        cards = real(*args)
        os.chown(cards[1].directory, 12345, 12345)
        return cards

    monkeypatch.setattr(zrpc.joining, "meet", meet)
    with Started({}, {}, secret=None) as outcomes:
        assert isinstance(outcomes[0], AuthenticationError)
        assert "found one of user 12345 with mode 0700" in str(outcomes[0])
