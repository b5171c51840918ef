"""Where workers listen, and which meshes are refused for lack of trust."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import zrpc
import zrpc.bootstrap
import zrpc.membership.endpoints
from tests.support.records import peer_record
from zrpc.bootstrap import join_mesh
from zrpc.errors import AuthenticationError, OptionError, RpcError
from zrpc.membership.endpoints import Meeting, listen_if_needed
from zrpc.membership.secret import ClusterSecret, new_secret
from zrpc.options import ZmqRpcBackendOptions
from zrpc.transport.curve import KeyPair
from zrpc.transport.network import Network

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
        monkeypatch.setattr(zrpc.bootstrap, key, lambda *_: threading.current_thread().name)


class Started:
    """Agents, each started in a thread that is named for its host; or their errors."""

    def __init__(
        self,
        *options: dict[str, Any],
        secret: ClusterSecret | None = SECRET,
        size: int | None = None,
    ) -> None:
        self.outcomes = [None] * len(options)
        self._store, self._secret = HashStore(), secret
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


def refuses(outcomes: Sequence[Any], kind: type[Exception], *texts: str) -> None:
    """Checks that all workers have the same kind of error, with these texts."""
    for error in outcomes:
        assert isinstance(error, kind), error
        assert [text for text in texts if text not in str(error)] == []


# -- one host ------------------------------------------------------------------------------


@pytest.mark.parametrize("security", ["auto", "none"])
def test_one_host_needs_no_secret_and_no_port(security: str) -> None:
    before = listeners()
    with Started({"security": security}, {"security": security}, secret=None) as agents:
        talk(agents)
        assert listeners() == before


def test_a_secret_can_be_required_of_one_host_too() -> None:
    with Started({"security": "required"}, {"security": "required"}, secret=None) as outcomes:
        text = "security='required' needs a cluster secret: make a file"
        refuses(outcomes, AuthenticationError, text)
    with Started({"security": "required"}, {"security": "auto"}) as agents:
        talk(agents)


def test_tcp_without_a_secret_is_refused_on_one_host_too() -> None:
    for security in ("auto", "required"):
        options = {"transport": "tcp", "security": security}
        with Started(options, options, secret=None) as outcomes:
            refuses(outcomes, AuthenticationError, "zrpc secret")


def test_a_single_worker_needs_no_secret() -> None:
    before = listeners()
    with Started({"transport": "tcp"}, secret=None) as [agent], agent.as_current():
        assert zrpc.rpc_sync(0, max, (1, 2)) == 2
        assert listeners() == before


def test_tcp_on_one_host_listens_on_loopback_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only one of the workers needs it, and if the interface is named."""
    for security, interface in (("auto", ""), ("required", "lo"), ("none", " 127.0.0.1 ")):
        monkeypatch.setenv("ZRPC_IFACE", interface)
        before = listeners()
        secret = None if security == "none" else SECRET
        options = {"security": security}
        with Started({"transport": "tcp", **options}, options, secret=secret) as agents:
            talk(agents)
            assert {address for address, _ in listeners() - before} == {"0100007F"}
    warnings = [r for r in caplog.records if "neither encrypted nor authenticated" in r.message]
    assert [record.levelname for record in warnings] == ["WARNING"] * 2


def test_all_workers_must_agree_on_security_none() -> None:
    with Started({"transport": "tcp", "security": "none"}, {"transport": "tcp"}) as outcomes:
        text = "WorkerInfo(id=0, name=w0) talks in the clear"
        other = "but WorkerInfo(id=1, name=w1) does not"
        refuses(outcomes, AuthenticationError, text, other)


def test_an_unknown_security() -> None:
    with pytest.raises(ValueError, match="'auto', 'required' or 'none', but got 'some'"):
        ZmqRpcBackendOptions(security="some")


def test_a_libzmq_that_cannot_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zrpc.membership.endpoints, "supports_curve", lambda: False)
    with Started({"security": "none"}, {"security": "none"}) as agents:
        talk(agents)
    with Started({"security": "auto"}, {"security": "required"}) as outcomes:
        refuses(outcomes, AuthenticationError, "install pyzmq from its wheels")


# -- several hosts -------------------------------------------------------------------------


@pytest.mark.usefixtures("hosts")
def test_several_hosts_without_a_secret_get_instructions() -> None:
    with Started({}, {}, secret=None) as outcomes:
        advice = "make a file with `zrpc secret FILE`, copy it to each host"
        refuses(outcomes, AuthenticationError, "they are on 2 hosts", advice, "ZRPC_SECRET_FILE")


@pytest.mark.usefixtures("hosts")
def test_an_address_that_other_hosts_cannot_reach_is_an_error() -> None:
    with Started({}, {}) as outcomes:
        refuses(outcomes, RpcError, "listens on tcp://127.0.0.1:", "set ZRPC_IFACE there")


@pytest.mark.usefixtures("hosts")
def test_all_learn_at_once_why_one_of_them_does_not_listen() -> None:
    text = "transport='ipc' needs all workers on one"
    with Started({"init_timeout": 100.0}, {"transport": "ipc"}) as outcomes:
        assert text in str(outcomes[1])
        told = "publish where they listen, but WorkerInfo(id=1, name=w1) on"
        refuses(outcomes[:1], RpcError, told, f"failed: {text}")


# -- interfaces ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interfaces", "texts"),
    [
        (["*", "0.0.0.0", "::", "[::]"], ["never listens on all of them"]),
        (
            ["nosuchthing0", "203.0.113.7", "a b"],
            ["can't listen on {} (", "set ZRPC_IFACE to the name or the address"],
        ),
    ],
    ids=["all", "missing"],
)
def test_an_interface_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, interfaces: list[str], texts: list[str]
) -> None:
    for interface in interfaces:
        monkeypatch.setenv("ZRPC_IFACE", interface)
        with Started({"transport": "tcp"}, {"transport": "tcp"}) as outcomes:
            refuses(outcomes, RpcError, *(text.format(interface) for text in texts))


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


def test_a_range_with_too_few_free_ports(neighbours: tuple[int, list[socket.socket]]) -> None:
    """The other worker learns of it at once, and doesn't wait for the init timeout."""
    first, listening = neighbours
    full = f"expected a free TCP port from {first} to {{}} on 127.0.0.1, found all {{}} of them in"
    options = {"transport": "tcp", "port_range": f"{first}-{first + 2}", "init_timeout": 100.0}
    with Started(options, options) as outcomes:
        advice = "use: give port_range or ZRPC_PORT_RANGE more"
        refuses(outcomes, RpcError, full.format(first + 2, 3), advice)
    listening[0].close()
    options["port_range"] = str(first)
    with Started(options, options) as outcomes:
        texts = sorted(str(error) for error in outcomes)
        assert texts[0].startswith(full.format(first, 1))
        assert "expected all workers to publish where they listen, but WorkerInfo(" in texts[1]
        assert full.format(first, 1) in texts[1]


def test_a_malformed_range_in_the_environment_is_an_error_without_tcp_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in ("20000:20100", "20100-20000", "0", "65536", "-1", "any"):
        monkeypatch.setenv("ZRPC_PORT_RANGE", text)
        with Started({}) as outcomes:
            told = "ZRPC_PORT_RANGE must be the first and the last TCP port"
            example = f"such as '20000-20100', from 1 to 65535, but got {text!r}"
            refuses(outcomes, OptionError, told, example)


def test_a_worker_listens_once_though_a_record_is_replaced() -> None:
    keys = KeyPair.new()
    own, stale, new = (
        peer_record(rank, 2, start=start, ipc=False, public_key=keys.public)
        for rank, start in ((0, 0), (1, 0), (1, 1))
    )
    network = Network(own.identity, 0, 2, ipc=False)
    meeting = Meeting(HashStore(), "", SECRET, ZmqRpcBackendOptions(), None, keys, network)
    before = listeners()
    with contextlib.ExitStack() as stack:
        stack.callback(network.close, linger=0, lost=())
        found = {listen_if_needed(meeting, own, [own, other]) for other in (stale, new)}
        assert found == {network.tcp_endpoint}
        assert len(listeners() - before) == 1


# -- directories ---------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs another user")
def test_a_directory_of_another_user_is_not_connected_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    own, other = (peer_record(rank, 2, directory=str(tmp_path)) for rank in (0, 1))
    network: Any = None
    meeting = Meeting(HashStore(), "", None, ZmqRpcBackendOptions(), None, None, network)
    listen = partial(listen_if_needed, meeting, own, [own, other])
    assert listen() == ""
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(AuthenticationError, match="found one of user 12345 with mode 0700"):
        listen()


# -- descriptors ---------------------------------------------------------------------------


def test_more_workers_on_a_host_than_descriptors_are_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise libzmq would abort the process when they all connect."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 250)
    with Started({}, {}) as outcomes:
        text = "1 other worker(s) on its host, found 256: raise it with `ulimit -n`"
        refuses(outcomes, RpcError, "expected a limit of 296 file descriptors or more", text)
