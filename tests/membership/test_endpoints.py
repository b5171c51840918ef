"""Where workers listen, and which meshes are refused for lack of trust."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import zrpc
import zrpc.bootstrap
import zrpc.membership.endpoints
from zrpc.bootstrap import join_mesh
from zrpc.errors import AuthenticationError, OptionError, RpcError
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.secret import ClusterSecret, new_secret
from zrpc.options import ZmqRpcBackendOptions
from zrpc.testing import local_mesh
from zrpc.testing.leaks import lasting

pytestmark = pytest.mark.usefixtures("no_leaks")

SOON = 10.0
SECRET = ClusterSecret(new_secret())


@pytest.fixture(autouse=True)
def _no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZRPC_SECRET", "ZRPC_SECRET_FILE", "ZRPC_IFACE", "ZRPC_PORT_RANGE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each worker see a host of its own."""
    for key in ("host_key", "network_key"):
        monkeypatch.setattr(zrpc.bootstrap, key, lambda: threading.current_thread().name)


class Started:
    """Agents, each started in a thread that is named for its host; or their errors."""

    def __init__(
        self,
        *options: dict[str, Any],
        secret: ClusterSecret | None = SECRET,
        size: int | None = None,
    ) -> None:
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

    def _start(self, rank: int, options: dict[str, Any]) -> None:
        try:
            self.outcomes[rank] = join_mesh(
                f"w{rank}",
                rank=rank,
                world_size=len(self.outcomes),
                store=self._store,
                options=ZmqRpcBackendOptions(**{"init_timeout": SOON, **options}),
                secret=self._secret,
            )
        except Exception as error:
            self.outcomes[rank] = error

    def __enter__(self) -> list[Any]:
        return self.outcomes

    def __exit__(self, *_: object) -> None:
        for outcome in self.outcomes:
            if not isinstance(outcome, Exception):
                outcome.close()


def talk(agents: Sequence[Any]) -> None:
    with agents[0].as_current():
        assert zrpc.rpc_sync(1, torch.add, (torch.ones(3), 1)).tolist() == [2, 2, 2]
    with agents[1].as_current():
        assert zrpc.rpc_sync(0, max, (1, 2)) == 2


def listeners() -> set[tuple[str, str]]:
    """The local addresses and sockets on which this process listens for tcp."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
    found = set()
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(name) as file:
            rows = [line.split() for line in file][1:]
        listening = [row for row in rows if row[3] == "0A" and row[9] in inodes]
        found |= {(row[1].split(":")[0], row[9]) for row in listening}
    return found


# -- one host ------------------------------------------------------------------------------


@pytest.mark.parametrize("security", ["auto", "none"])
def test_one_host_needs_no_secret(security: str) -> None:
    before = listeners()
    with Started({"security": security}, {"security": security}, secret=None) as agents:
        talk(agents)
        assert listeners() == before


def test_a_secret_can_be_required_of_one_host_too() -> None:
    with Started({"security": "required"}, {"security": "required"}, secret=None) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "security='required' needs a cluster secret: make a file" in str(error)
    with Started({"security": "required"}, {"security": "auto"}) as agents:
        talk(agents)


@pytest.mark.parametrize("security", ["auto", "required"])
def test_tcp_without_a_secret_is_refused_on_one_host_too(security: str) -> None:
    options = {"transport": "tcp", "security": security}
    with Started(options, options, secret=None) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "zrpc secret" in str(error)


def test_a_single_worker_needs_no_secret() -> None:
    with Started({"transport": "tcp"}, secret=None) as [agent], agent.as_current():
        assert zrpc.rpc_sync(0, max, (1, 2)) == 2
        assert agent.network._gatekeeper is None


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="needs /proc")
@pytest.mark.parametrize("security", ["auto", "required", "none"])
def test_tcp_on_one_host_listens_on_loopback_only(security: str) -> None:
    before = listeners()
    options = {"transport": "tcp", "security": security}
    with Started(options, options) as agents:
        talk(agents)
        assert {address for address, _ in listeners() - before} == {"0100007F"}
        guarded = [agent.network._gatekeeper is not None for agent in agents]
        assert guarded == [security != "none"] * 2


def test_plain_tcp_needs_no_secret_but_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    options = {"transport": "tcp", "security": "none"}
    with Started(options, options, secret=None) as agents:
        talk(agents)
    warnings = [r for r in caplog.records if "neither encrypted nor authenticated" in r.message]
    assert len(warnings) == 2
    assert all(record.levelname == "WARNING" for record in warnings)


def test_all_workers_must_agree_on_security_none() -> None:
    with Started({"transport": "tcp", "security": "none"}, {"transport": "tcp"}) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "WorkerInfo(id=0, name=w0) talks in the clear" in str(error)
            assert "but WorkerInfo(id=1, name=w1) does not" in str(error)


def test_an_unknown_security() -> None:
    with pytest.raises(ValueError, match="'auto', 'required' or 'none', but got 'some'"):
        ZmqRpcBackendOptions(security="some")


def test_a_mesh_of_the_test_fixture_has_a_secret() -> None:
    with local_mesh(2, options={"transport": "tcp"}) as mesh:
        assert mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2)) == 2


@pytest.mark.parametrize("security", ["auto", "required", "none"])
def test_a_libzmq_that_cannot_encrypt(monkeypatch: pytest.MonkeyPatch, security: str) -> None:
    monkeypatch.setattr(zrpc.membership.endpoints, "supports_curve", lambda: False)
    with Started({"security": security}, {"security": security}) as outcomes:
        if security == "none":
            talk(outcomes)
        else:
            assert all("install pyzmq from its wheels" in str(error) for error in outcomes)


# -- several hosts -------------------------------------------------------------------------


@pytest.mark.usefixtures("hosts")
def test_several_hosts_without_a_secret_get_instructions() -> None:
    with Started({}, {}, secret=None) as outcomes:
        for error in outcomes:
            assert isinstance(error, AuthenticationError)
            assert "they are on 2 host(s)" in str(error)
            assert "make a file with `zrpc secret FILE`, copy it to each host" in str(error)
            assert "ZRPC_SECRET_FILE" in str(error)


@pytest.mark.usefixtures("hosts")
def test_an_address_that_other_hosts_cannot_reach_is_an_error() -> None:
    with Started({}, {}) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert "listens on tcp://127.0.0.1:" in str(error)
            assert "set ZRPC_IFACE there" in str(error)


@pytest.mark.usefixtures("hosts")
def test_ipc_between_hosts_is_refused() -> None:
    with Started({"transport": "ipc"}, {"transport": "ipc"}) as outcomes:
        assert all("transport='ipc' needs all workers on one" in str(error) for error in outcomes)


@pytest.mark.usefixtures("hosts")
def test_all_learn_why_one_of_them_gives_up_before_it_listens() -> None:
    """At once: they don't wait for it until the init timeout."""
    with Started({}, {"transport": "ipc"}) as outcomes:
        assert "transport='ipc' needs all workers on one" in str(outcomes[1])
        assert "WorkerInfo(id=1, name=w1) on" in str(outcomes[0])
        assert "failed: transport='ipc' needs all workers on one" in str(outcomes[0])


# -- interfaces ----------------------------------------------------------------------------


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1", " 127.0.0.1 "])
def test_an_interface_can_be_named(monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    monkeypatch.setenv("ZRPC_IFACE", interface)
    before = listeners()
    with Started({"transport": "tcp"}, {"transport": "tcp"}) as agents:
        talk(agents)
        assert {address for address, _ in listeners() - before} == {"0100007F"}


@pytest.mark.parametrize("interface", ["*", "0.0.0.0", "::", "[::]"])
def test_all_interfaces_are_refused(monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    monkeypatch.setenv("ZRPC_IFACE", interface)
    with Started({"transport": "tcp"}, {"transport": "tcp"}) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert "never listens on all of them" in str(error)


@pytest.mark.parametrize("interface", ["nosuchthing0", "203.0.113.7", "a b"])
def test_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, interface: str) -> None:
    monkeypatch.setenv("ZRPC_IFACE", interface)
    with Started({"transport": "tcp"}, {"transport": "tcp"}) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert f"can't listen on {interface} (" in str(error)
            assert "set ZRPC_IFACE to the name or the address" in str(error)


# -- ports ---------------------------------------------------------------------------------


@pytest.fixture
def neighbours() -> Iterator[tuple[int, list[socket.socket]]]:
    """The first of three consecutive ports, and sockets that listen on them; close some."""
    for first in range(21000, 22000, 3):
        with contextlib.ExitStack() as stack:
            try:
                listening = [
                    stack.enter_context(socket.create_server(("127.0.0.1", first + i)))
                    for i in range(3)
                ]
            except OSError:
                continue
            yield first, listening
            return
    pytest.fail("no three consecutive ports are free")


def ports(agents: Sequence[Any]) -> list[int]:
    return sorted(int(agent.network.tcp_endpoint.rpartition(":")[2]) for agent in agents)


@pytest.mark.parametrize("by", ["option", "variable"])
def test_workers_listen_on_the_free_ports_of_a_range(
    neighbours: tuple[int, list[socket.socket]], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    first, listening = neighbours
    for other in listening[1:]:
        other.close()
    options = {"transport": "tcp"}
    if by == "option":
        monkeypatch.setenv("ZRPC_PORT_RANGE", "1-2")  # the option counts
        options["port_range"] = f"{first}-{first + 2}"
    else:
        monkeypatch.setenv("ZRPC_PORT_RANGE", f" {first} - {first + 2} ")
    with Started(options, options) as agents:
        talk(agents)
        assert ports(agents) == [first + 1, first + 2]


def test_a_range_without_a_free_port(neighbours: tuple[int, list[socket.socket]]) -> None:
    first, _ = neighbours
    options = {"transport": "tcp", "port_range": f"{first}-{first + 2}"}
    with Started(options, options) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert f"expected a free TCP port from {first} to {first + 2} on 127.0.0.1" in str(
                error
            )
            assert "found all 3 of them in use: give port_range or ZRPC_PORT_RANGE more" in str(
                error
            )


def test_one_worker_more_than_ports(neighbours: tuple[int, list[socket.socket]]) -> None:
    """The other one learns of it at once, and doesn't wait for the init timeout."""
    first, listening = neighbours
    listening[0].close()
    options = {"transport": "tcp", "port_range": str(first), "init_timeout": 100.0}
    begun = time.monotonic()
    with Started(options, options) as outcomes:
        texts = sorted(str(error) for error in outcomes)
        full = f"expected a free TCP port from {first} to {first} on 127.0.0.1"
        assert texts[0].startswith(full)
        assert "expected all workers to publish where they listen, but WorkerInfo(" in texts[1]
        assert full in texts[1]
    assert time.monotonic() - begun < 50


@pytest.mark.parametrize("variable", ["20000:20100", "20100-20000", "0", "65536", "-1", "any"])
def test_a_malformed_range_in_the_environment_is_an_error_without_tcp_too(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("ZRPC_PORT_RANGE", variable)
    with Started({}) as [error]:
        assert isinstance(error, OptionError)
        assert "ZRPC_PORT_RANGE must be the first and the last TCP port" in str(error)
        assert f"such as '20000-20100', from 1 to 65535, but got {variable!r}" in str(error)


# -- forged peer records --------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs another user")
def test_a_directory_of_another_user_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    real = zrpc.bootstrap.meet

    def meet(*args: Any, **options: Any) -> list[PeerRecord]:
        records = real(*args, **options)
        os.chown(records[1].directory, 12345, 12345)
        return records

    monkeypatch.setattr(zrpc.bootstrap, "meet", meet)
    with Started({}, {}, secret=None) as outcomes:
        assert isinstance(outcomes[0], AuthenticationError)
        assert "found one of user 12345 with mode 0700" in str(outcomes[0])


# -- descriptors ---------------------------------------------------------------------------


def test_more_workers_on_a_host_than_descriptors_are_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise libzmq would abort the process when they all connect."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 250)
    with Started({}, {}) as outcomes:
        for error in outcomes:
            assert isinstance(error, RpcError)
            assert "expected a limit of 296 file descriptors or more" in str(error)
            assert "1 other worker(s) on its host, found 256: raise it with `ulimit -n`" in str(
                error
            )
