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
from tests.support.listeners import listeners
from tests.support.records import peer_record
from tests.support.threads import assert_raised, start_all
from tests.support.waiting import SOON
from zrpc.bootstrap import join_mesh
from zrpc.errors import AuthenticationError, OptionError, RpcError
from zrpc.membership.endpoints import Meeting, listen_if_needed
from zrpc.membership.secret import ClusterSecret, new_secret
from zrpc.options import ZmqRpcBackendOptions
from zrpc.transport.curve import KeyPair
from zrpc.transport.network import Network

pytestmark = pytest.mark.usefixtures("no_leaks")

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


@contextlib.contextmanager
def started(*options: dict[str, Any], secret: ClusterSecret | None = SECRET) -> Iterator[list[Any]]:
    """The agents of w0, w1 ..., with options for each; or their errors."""
    how = {"world_size": len(options), "store": HashStore(), "secret": secret}
    chosen = [ZmqRpcBackendOptions(**{"init_timeout": SOON, **own}) for own in options]
    calls = [
        partial(join_mesh, f"w{rank}", rank=rank, options=own, **how)
        for rank, own in enumerate(chosen)
    ]
    outcomes = start_all(calls, 2 * SOON)()
    try:
        yield outcomes
    finally:
        for outcome in outcomes:
            if not isinstance(outcome, Exception):
                outcome.close()


def talk(agents: Sequence[Any]) -> None:
    with agents[0].as_current():
        assert zrpc.rpc_sync(1, torch.add, (torch.ones(3), 1)).tolist() == [2, 2, 2]
    with agents[1].as_current():
        assert zrpc.rpc_sync(0, max, (1, 2)) == 2


# -- one host ------------------------------------------------------------------------------


def test_one_host_needs_no_secret_and_no_port_unless_they_are_required() -> None:
    before = listeners()
    for security in ("auto", "none"):
        with started({"security": security}, {"security": security}, secret=None) as agents:
            talk(agents)
            assert listeners() == before
    with started({"transport": "tcp"}, secret=None) as [agent], agent.as_current():
        assert zrpc.rpc_sync(0, max, (1, 2)) == 2  # alone
        assert listeners() == before
    with started({"security": "required"}, {"security": "required"}, secret=None) as outcomes:
        text = "security='required' needs a cluster secret: make a file"
        assert_raised(outcomes, AuthenticationError, text)
    with started({"security": "required"}, {"security": "auto"}) as agents:
        talk(agents)
    for security in ("auto", "required"):
        options = {"transport": "tcp", "security": security}
        with started(options, options, secret=None) as outcomes:
            assert_raised(outcomes, AuthenticationError, "zrpc secret")


def test_tcp_on_one_host_listens_on_loopback_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only one of the workers needs it, and if the interface is named."""
    for security, interface in (("auto", ""), ("required", "lo"), ("none", " 127.0.0.1 ")):
        monkeypatch.setenv("ZRPC_IFACE", interface)
        before = listeners()
        secret = None if security == "none" else SECRET
        options = {"security": security}
        with started({"transport": "tcp", **options}, options, secret=secret) as agents:
            talk(agents)
            assert {address for address, _ in listeners() - before} == {"0100007F"}
    warnings = [r for r in caplog.records if "neither encrypted nor authenticated" in r.message]
    assert [record.levelname for record in warnings] == ["WARNING"] * 2


def test_all_workers_must_agree_on_security_none() -> None:
    with started({"transport": "tcp", "security": "none"}, {"transport": "tcp"}) as outcomes:
        text = "WorkerInfo(id=0, name=w0) talks in the clear"
        other = "but WorkerInfo(id=1, name=w1) does not"
        assert_raised(outcomes, AuthenticationError, text, other)


def test_an_unknown_security() -> None:
    with pytest.raises(ValueError, match="'auto', 'required' or 'none', but got 'some'"):
        ZmqRpcBackendOptions(security="some")


def test_a_libzmq_that_cannot_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zrpc.membership.endpoints, "supports_curve", lambda: False)
    with started({"security": "none"}, {"security": "none"}) as agents:
        talk(agents)
    with started({"security": "auto"}, {"security": "required"}) as outcomes:
        assert_raised(outcomes, AuthenticationError, "install pyzmq from its wheels")


# -- several hosts -------------------------------------------------------------------------


@pytest.mark.usefixtures("hosts")
def test_several_hosts_get_instructions_if_they_do_not_reach_each_other() -> None:
    with started({}, {}, secret=None) as outcomes:
        advice = "make a file with `zrpc secret FILE`, copy it to each host"
        assert_raised(
            outcomes, AuthenticationError, "they are on 2 hosts", advice, "ZRPC_SECRET_FILE"
        )
    with started({}, {}) as outcomes:
        assert_raised(outcomes, RpcError, "listens on tcp://127.0.0.1:", "set ZRPC_IFACE there")
    # All learn at once why one of them does not listen.
    text = "transport='ipc' needs all workers on one"
    with started({"init_timeout": 100.0}, {"transport": "ipc"}) as outcomes:
        assert text in str(outcomes[1])
        told = "publish where they listen, but WorkerInfo(id=1, name=w1) on"
        assert_raised(outcomes[:1], RpcError, told, f"failed: {text}")


# -- interfaces ----------------------------------------------------------------------------


def test_an_interface_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "set ZRPC_IFACE to the name or the address"
    for interfaces, texts in (
        (("*", "0.0.0.0", "::", "[::]"), ["never listens on all of them"]),
        (("nosuchthing0", "203.0.113.7", "a b"), ["can't listen on {} (", advice]),
    ):
        for interface in interfaces:
            monkeypatch.setenv("ZRPC_IFACE", interface)
            with started({"transport": "tcp"}, {"transport": "tcp"}) as outcomes:
                assert_raised(outcomes, RpcError, *(text.format(interface) for text in texts))


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


def test_workers_listen_on_the_free_ports_of_a_range(
    neighbours: tuple[int, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, listening = neighbours
    for other in listening[1:]:
        other.close()
    option = {"transport": "tcp", "port_range": f"{first}-{first + 2}"}
    # The option counts.
    for options, variable in ((option, "1-2"), ({"transport": "tcp"}, f" {first} - {first + 2} ")):
        monkeypatch.setenv("ZRPC_PORT_RANGE", variable)
        with started(options, options) as agents:
            talk(agents)
            ports = {int(agent.network.tcp_endpoint.rpartition(":")[2]) for agent in agents}
            assert ports == {first + 1, first + 2}


def test_a_range_with_too_few_free_ports(neighbours: tuple[int, list[socket.socket]]) -> None:
    """The other worker learns of it at once, and doesn't wait for the init timeout."""
    first, listening = neighbours
    full = f"expected a free TCP port from {first} to {{}} on 127.0.0.1, found all {{}} of them in"
    options = {"transport": "tcp", "port_range": f"{first}-{first + 2}", "init_timeout": 100.0}
    with started(options, options) as outcomes:
        advice = "use: give port_range or ZRPC_PORT_RANGE more"
        assert_raised(outcomes, RpcError, full.format(first + 2, 3), advice)
    listening[0].close()
    options["port_range"] = str(first)
    with started(options, options) as outcomes:
        texts = sorted(str(error) for error in outcomes)
        assert texts[0].startswith(full.format(first, 1))
        assert "expected all workers to publish where they listen, but WorkerInfo(" in texts[1]
        assert full.format(first, 1) in texts[1]


def test_a_malformed_range_in_the_environment_is_an_error_without_tcp_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in ("20000:20100", "20100-20000", "0", "65536", "-1", "any"):
        monkeypatch.setenv("ZRPC_PORT_RANGE", text)
        with started({}) as outcomes:
            told = "ZRPC_PORT_RANGE must be the first and the last TCP port"
            example = f"such as '20000-20100', from 1 to 65535, but got {text!r}"
            assert_raised(outcomes, OptionError, told, example)


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


@pytest.mark.parametrize(
    ("count", "needed", "why"),
    [(225, 257, "and 14 more for each other worker"), (215, 261, "to talk to 1 other worker(s)")],
    ids=["before it listens", "when it has met the others"],
)
def test_more_workers_on_a_host_than_descriptors_are_refused_with_the_number(
    monkeypatch: pytest.MonkeyPatch, count: int, needed: int, why: str
) -> None:
    """Otherwise libzmq would abort the process when they all connect."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * count)
    with started({}, {}) as outcomes:
        expected = f"expected a limit of {needed} file descriptors or more"
        text = f"{why} on its host, found 256: raise it with `ulimit -n`"
        assert_raised(outcomes, RpcError, expected, text)
