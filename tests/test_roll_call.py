"""The roll call: who waits for a call that is lost is told so, and nobody else."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from waiting import until

import zrpc
from zrpc import roll_call
from zrpc.errors import ProtocolError
from zrpc.roll_call import RollCallLayer
from zrpc.testing import Mesh, faults
from zrpc.transport.network import BULK
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=2, faults=True, options={"shared_memory": 0})

OFTEN = 0.05
SOON = 10.0
SMALL, LARGE = b"x", b"x" * BULK


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_EVERY", OFTEN)
    monkeypatch.setattr(roll_call, "_PATIENCE", 4 * OFTEN)


@pytest.fixture(autouse=True)
def closed_gate() -> None:
    for event in (gate, entered):
        event.clear()


@pytest.fixture
def caller(mesh: Mesh) -> Any:
    with mesh.agent(0).as_current():
        yield mesh


def echo(value: Any) -> Any:
    return value


gate, entered = threading.Event(), threading.Event()


def wait() -> str:
    entered.set()
    assert gate.wait(SOON)
    return "done"


def echo_late(value: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return value


@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["call", "answer"])
def test_who_waits_for_what_is_lost_is_told(
    caller: Mesh, way: tuple[int, int], value: bytes
) -> None:
    assert zrpc.rpc_sync(1, echo, (value,)) == value
    with faults.drop(caller, *way), pytest.raises(zrpc.RpcError, match=r"is lost.*may run twice"):
        zrpc.rpc_sync(1, echo, (value,), timeout=0)
    assert zrpc.rpc_sync(1, echo, (value,)) == value


def test_the_others_go_on(caller: Mesh) -> None:
    before = zrpc.rpc_async(1, wait, timeout=0)
    assert entered.wait(SOON)
    with faults.drop(caller, 0, 1):
        lost = zrpc.rpc_async(1, echo, (1,), timeout=0)
        with pytest.raises(zrpc.RpcError, match="is lost"):
            lost.wait()
    assert not before.done()
    gate.set()
    assert before.wait() == "done"


def test_what_takes_long_is_not_lost(caller: Mesh) -> None:
    """Handlers, and messages of all sizes in both directions, by a network that is slow."""
    source = random.Random(7)
    with faults.delay(caller, 0, 1, seconds=2 * OFTEN):
        futures = [
            zrpc.rpc_async(1, echo_late, (value, source.random() * 4 * OFTEN), timeout=0)
            for value in source.choices([SMALL, LARGE], k=60)
        ]
        for future in futures:
            assert future.wait() in (SMALL, LARGE)


@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["question", "answer"])
def test_a_question_that_is_lost_is_asked_again(caller: Mesh, way: tuple[int, int]) -> None:
    future = zrpc.rpc_async(1, wait, timeout=0)
    assert entered.wait(SOON)
    heard = caller.agent(1).layer(RollCallLayer)._copies[Kind.ROLL_CALL]._seen
    with faults.drop(caller, *way) as fault:
        until(lambda: fault.happened == 1)
        number = heard.get(0, (0,))[0]
    until(lambda: heard.get(0, (0,))[0] > number + 1)
    gate.set()
    assert future.wait() == "done"


def test_a_word_that_comes_twice_counts_once(caller: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two ways, one must not do for the other."""
    layer = caller.agent(0).layer(RollCallLayer)
    assert zrpc.rpc_sync(1, echo, (LARGE,)) == LARGE
    future = zrpc.rpc_async(1, wait, timeout=0)
    assert entered.wait(SOON)
    until(lambda: 1 in layer._asked)
    (call,) = caller.agent(0).caller.calls.under_way()
    done = threading.Event()

    def claim() -> None:
        """That the callee does not have it: by one of two ways, again and again; and of old."""
        for number in (layer._asked[1].number, 1):
            for _ in range(3):
                body = roll_call._HEAD.pack(number, 0, 2, 0) + roll_call._CALL_ID.pack(call.call_id)
                layer._on_missing(Message(Kind.MISSING, body=body, sender=1))
        done.set()

    caller.agent(0).in_io_thread(claim)
    assert done.wait(SOON)
    gate.set()
    assert future.wait() == "done"


@pytest.mark.parametrize("body", [b"", b"1" * 17, b"1" * 19])
def test_words_of_nonsense_are_refused(mesh: Mesh, body: bytes) -> None:
    layer = mesh.agent(0).layer(RollCallLayer)
    with pytest.raises(ProtocolError, match="numbers of calls"):
        layer._on_missing(Message(Kind.MISSING, body=body, sender=1))


@pytest.mark.parametrize("size", [1, BULK], ids=["small", "large"])
def test_a_layer_is_told_whose_messages_are_lost(caller: Mesh, size: int) -> None:
    """Also where they have no answer; they count as received then."""
    sender, receiver = caller.agent(0), caller.agent(1)
    for value in (SMALL, LARGE):
        assert zrpc.rpc_sync(1, echo, (value,)) == value
    told: list[int] = []
    receiver.dispatcher.missed.append(told.append)
    message = Message(Kind.CANCEL, 2**60, body=bytes(size))
    with faults.drop(caller, 0, 1) as fault:
        sender.outbox.post(1, message)
        until(lambda: fault.happened == 1)
    sender.outbox.post(1, message)
    receiver.awaited.append(lambda: [0])
    until(lambda: bool(told))
    assert told == [0]
    assert sender._network.sent([1]) == receiver.dispatcher.received[0]
    receiver.awaited.clear()


def test_what_is_short_for_a_moment_is_not_lost(caller: Mesh) -> None:
    """It may be under way by another connection."""
    agent = caller.agent(1)
    layer = agent.layer(RollCallLayer)
    told: list[int] = []
    agent.dispatcher.missed.append(told.append)
    sent = agent.dispatcher.received_from(0, 0)
    for short, at in [(2, 0.0), (2, 0.4), (0, 0.6), (3, 1.5), (3, 1.8), (1, 1.9)]:
        layer._compare(0, 0, sent + short, at * layer.every)
    assert told == []
    # Of three messages, two are missing for more than half of the time between two questions.
    for short, at in [(0, 2.0), (3, 3.0), (2, 3.4), (2, 3.6), (2, 4.8), (2, 5.6)]:
        layer._compare(0, 0, sent + short, at * layer.every)
    assert told == [0]
    assert agent.dispatcher.received_from(0, 0) == sent + 2


def test_nothing_is_asked_where_nothing_waits(caller: Mesh) -> None:
    layer = caller.agent(0).layer(RollCallLayer)
    future = zrpc.rpc_async(1, wait)
    until(lambda: 1 in layer._asked)
    gate.set()
    assert future.wait() == "done"
    until(lambda: not layer._asked)


def test_it_is_not_kept_of_whom_is_gone(caller: Mesh) -> None:
    agent = caller.agent(0)
    layer = agent.layer(RollCallLayer)
    future = zrpc.rpc_async(1, echo_late, (1, 6 * OFTEN))
    until(lambda: 1 in layer._asked)
    caller.agent(1).shutdown(graceful=False)
    with pytest.raises(zrpc.WorkerDied):
        future.wait()
    until(lambda: not layer._asked)
