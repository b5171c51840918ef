"""A connection breaks while messages are in flight: nobody waits forever for lost ones."""

from __future__ import annotations

import errno
import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

import zrpc
from tests.support.observed import ask_often
from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from tests.transport.breaking_relay import BreakingRelay
from tests.transport.numbered import opened, received
from zrpc.agent.agent import Agent
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh
from zrpc.transport.chunks import CHUNK_BYTES
from zrpc.transport.network import BULK_BYTES

SMALL = BULK_BYTES // 4
LARGE = 16 * CHUNK_BYTES


@pytest.fixture
def mesh(make_mesh: Callable[..., Mesh]) -> Mesh:
    """Yields two workers that use encrypted tcp."""
    return make_mesh(workers=2, options={"transport": "tcp"})


@pytest.fixture(params=["call", "answer"])
def relay(mesh: Mesh, request: pytest.FixtureRequest) -> Iterator[BreakingRelay]:
    """Yields a relay for the calls of worker0 to worker1, or for the answers."""
    sender = 0 if request.param == "call" else 1
    with BreakingRelay.before(mesh, sender, 1 - sender) as relay:
        relay.sender = sender
        yield relay
        mesh.shutdown()  # through the relay, too


def echo(value: Any) -> Any:
    return value


def read(rref: Any, _: bytes) -> Any:
    return rref.to_here()


def counts_agree(mesh: Mesh) -> bool:
    """Returns whether all messages counted as sent are counted as received."""
    agents = [mesh.agent(rank) for rank in range(2)]
    return all(
        agents[i].network.sent([1 - i]) == agents[1 - i].dispatcher.received[i] for i in range(2)
    )


@pytest.mark.system
@pytest.mark.parametrize("at_the_end", [False, True], ids=["within", "at the end"])
def test_a_break_within_a_message_in_chunks(
    mesh: Mesh, relay: BreakingRelay, at_the_end: bool
) -> None:
    """The error comes at once, and says whether the function ran. The next call works.

    If nothing follows on that connection, a question about the call reveals the loss.
    """
    size, good = LARGE, LARGE // 3
    if at_the_end:
        ask_often(mesh)
        size, good = 3 * CHUNK_BYTES - 1000, 2 * CHUNK_BYTES + CHUNK_BYTES // 2
    which, hint = ("call", "has not run") if relay.sender == 0 else ("answer", "has run")
    with mesh.agent(0).as_current():
        assert zrpc.rpc_sync(1, echo, (b"x" * BULK_BYTES,)) == b"x" * BULK_BYTES
        relay.break_after(good)
        text = f"broke in the midst of a large {which}.*{hint}"
        with pytest.raises(zrpc.RpcError, match=text) as info:
            zrpc.rpc_sync(1, echo, (bytes(size),), timeout=0)
        assert info.value.executed is (which == "answer")
        assert relay.broken.is_set()
        assert not mesh.agent(1 - relay.sender).dispatcher.unfinished
        assert zrpc.rpc_sync(1, echo, (b"y" * LARGE,)) == b"y" * LARGE
    until(lambda: counts_agree(mesh))


class FailsOnce:
    """A socket that runs out of memory at one of its sends."""

    def __init__(self, socket: Any, good: int) -> None:
        self._socket = socket
        self._good = good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, *args: Any) -> Any:
        self._good -= 1
        if self._good == -1:
            raise zmq.ZMQError(errno.ENOMEM)
        return self._socket.send(*args)


@pytest.mark.system
@pytest.mark.parametrize("good", [0, 1, 7])
def test_a_large_message_that_is_sent_in_part(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """Its receiver does not wait for the rest, and the counts agree."""
    with mesh.agent(0).as_current():
        assert zrpc.rpc_sync(1, echo, (b"x" * BULK_BYTES,)) == b"x" * BULK_BYTES
        mailbox = mesh.agent(0).network._bulk[1]
        with monkeypatch.context() as patched:
            patched.setattr(mailbox, "_socket", FailsOnce(mailbox._socket, good))
            with pytest.raises(MemoryError, match="can't be sent"):
                zrpc.rpc_sync(1, echo, (bytes(5 * CHUNK_BYTES),))
        until(lambda: counts_agree(mesh))
        assert not mesh.agent(1).dispatcher.unfinished
        assert zrpc.rpc_sync(1, echo, (b"y" * LARGE,)) == b"y" * LARGE


@pytest.mark.system
def test_a_break_within_a_small_message(mesh: Mesh, relay: BreakingRelay) -> None:
    ask_often(mesh)
    with mesh.agent(0).as_current():
        assert zrpc.rpc_sync(1, echo, (b"x",)) == b"x"
        # Far more than the questions of loss detection, which are sent here too.
        relay.break_after(SMALL // 2)
        with pytest.raises(zrpc.RpcError, match=r"is lost: a connection broke.*may run twice"):
            zrpc.rpc_sync(1, echo, (bytes(SMALL),), timeout=0)
        assert relay.broken.is_set()
        assert zrpc.rpc_sync(1, echo, (b"x",)) == b"x"
    until(lambda: counts_agree(mesh))


def test_connections_are_kept_alive(mesh: Mesh) -> None:
    """The system keeps them alive, so no firewall forgets idle ones."""
    assert mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2)) == 2
    port = int(mesh.agent(0).network.endpoint(1).rpartition(":")[2])

    def timers() -> list[str]:
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return [row[5].split(":")[0] for row in rows if row[2].endswith(f":{port:04X}")]

    until(lambda: "02" in timers())  # the keepalive timer, when everything is acknowledged


@pytest.mark.system
@pytest.mark.parametrize("relay", ["call"], indirect=True)
def test_a_lost_call_keeps_no_reference(mesh: Mesh, relay: BreakingRelay) -> None:
    with mesh.agent(0).as_current():
        there, here = zrpc.remote(1, list), zrpc.RRef([1])
        assert there.to_here() == []
        for rref in (there, here):
            relay.break_after(LARGE // 3)
            with pytest.raises(zrpc.RpcError, match="has not run"):
                zrpc.rpc_sync(1, read, (rref, bytes(LARGE)))
            assert mesh.agent(0).service(RRefService).idle()
            assert zrpc.rpc_sync(1, read, (rref, b"")) == rref.to_here()
        del rref, here
        until(lambda: not zrpc.stats().rrefs_owned, collect=True)


def test_messages_received_before_a_break_are_read_after_it() -> None:
    """ZeroMQ renames a connection when its peer has opened the next one."""
    with opened() as networks:
        endpoint = networks[1].listen_tcp("127.0.0.1", None)
        with BreakingRelay(endpoint) as relay:
            networks[0].connect([endpoint, relay.endpoint])
            for attempt in range(3):
                networks[0].send(1, b"hello")
                assert received(networks[1])[1] == b"hello"
                passed = len(relay.heard)
                sent = [b"%d-%d" % (attempt, number) for number in range(9)]
                for first in sent[:8]:
                    networks[0].send(1, first, [b"more"])
                arrived = [received(networks[1])]
                until(lambda passed=passed: len(relay.heard) == passed + 8 * 11)
                until(lambda: relay.all_read)  # what is unread when the next one opens is lost
                relay.break_after(0)
                assert relay.broken.wait(SOON)
                networks[0].send(1, sent[8], [b"more"])
                until(lambda passed=passed: len(relay.heard) > passed + 9 * 11 + 64)
                arrived += [received(networks[1]) for _ in range(8)]
                assert sorted(arrived) == [(b"z0", first, [b"more"]) for first in sent]


@pytest.mark.system
def test_a_connection_that_breaks_in_its_handshake_without_a_word_is_made_again(
    mesh: Mesh,
) -> None:
    """What was sent is neither sent nor lost meanwhile: no question can come through either."""
    with BreakingRelay.before(mesh, 0, 1) as relay, mesh.agent(0).as_current():
        relay.swallow(1)
        assert zrpc.rpc_sync(1, echo, (b"x",), timeout=SOON) == b"x"
        mesh.shutdown()


_ran: set[int] = set()


def note(number: int, _: bytes, size: int) -> bytes:
    _ran.add(number)
    return bytes(size)


def call_until(
    agent: Agent, end: float, numbers: Iterator[int], said: list[tuple[int, str]]
) -> None:
    """Makes calls of all sizes, without a timeout; collects the errors of those that fail."""
    source = random.Random(next(numbers))
    with agent.as_current():
        while time.monotonic() < end:
            number = next(numbers)
            sizes = source.choices([10, 1000, 50_000, BULK_BYTES, 3 * CHUNK_BYTES], k=2)
            try:
                assert (
                    len(zrpc.rpc_sync(1, note, (number, bytes(sizes[0]), sizes[1]), 0)) == sizes[1]
                )
            except Exception as error:
                said.append((number, str(error)))


@pytest.mark.system
def test_connections_that_break_again_and_again(mesh: Mesh) -> None:
    """No call waits forever, and its error says correctly whether the function ran."""
    ask_often(mesh)
    _ran.clear()
    source, numbers, said, end = random.Random(7), itertools.count(), [], time.monotonic() + 1.5
    with BreakingRelay.before(mesh, 0, 1) as there, BreakingRelay.before(mesh, 1, 0) as back:
        finish = start_all([partial(call_until, mesh.agent(0), end, numbers, said)] * 4, 2 * SOON)
        while time.monotonic() < end:
            relay = source.choice([there, back])
            relay.break_after(source.choice([1, 100, 3000, BULK_BYTES, CHUNK_BYTES]))
            relay.broken.wait(0.3)
        assert finish() == [None] * 4
        mesh.shutdown()
    assert said
    for number, text in said:
        if "has not run" in text:
            assert number not in _ran
        elif "the function has run;" in text:
            assert number in _ran
        else:
            assert "whether the function has run is not known" in text.lower()
