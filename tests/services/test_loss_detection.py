"""Loss detection: a call that is lost fails, and no other call does."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import zrpc
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.calls.outbox import Outbox
from zrpc.calls.pending_call import PendingCall
from zrpc.errors import ProtocolError
from zrpc.services import loss_detection
from zrpc.services.loss_detection import LossDetectionTiming, LossDetector
from zrpc.testing import Mesh, faults
from zrpc.transport.network import BULK_BYTES
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

pytestmark = pytest.mark.zrpc(workers=2, faults=True, options={"shared_memory": 0})

OFTEN = 0.05
SOON = 10.0
SMALL, LARGE = b"x", b"x" * BULK_BYTES


class _Probe(Service):
    """Waits for messages of some members, and notes whose are lost."""

    def __init__(self, agent: Agent, told: list[int]) -> None:
        super().__init__(agent)
        self.told = told
        self.awaited: list[MemberId] = []

    def awaited_members(self) -> list[MemberId]:
        return self.awaited

    def on_messages_lost(self, member: MemberId) -> None:
        self.told.append(member)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_detection, "TIMING", LossDetectionTiming(OFTEN, 4 * OFTEN))


@pytest.fixture(autouse=True)
def closed_gate() -> None:
    for event in (gate, entered):
        event.clear()


@pytest.fixture
def caller(mesh: Mesh) -> Any:
    with mesh.agent(0).as_current():
        yield mesh


gate, entered = threading.Event(), threading.Event()


def wait() -> str:
    entered.set()
    assert gate.wait(SOON)
    return "done"


def wait_until_cancelled() -> None:
    zrpc.current_call().wait_cancelled(SOON)


def echo_late(value: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return value


def in_io_thread(agent: Agent, job: Any) -> Any:
    """What ``job()`` returns there."""
    results: list[Any] = []
    agent.receiver.in_io_thread(lambda: results.append(job()))
    until(lambda: bool(results))
    return results[0]


@contextlib.contextmanager
def unasked(mesh: Mesh) -> Iterator[None]:
    """Meanwhile worker0 asks nothing, so that no fault meets a question or its answer."""
    agent = mesh.agent(0)
    detector = agent.service(LossDetector)
    in_io_thread(agent, lambda: setattr(detector, "_checked_at", math.inf))
    try:
        yield
    finally:
        detector._checked_at = 0.0


@pytest.mark.system
@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["call", "answer"])
def test_a_wait_for_a_lost_message_fails(caller: Mesh, way: tuple[int, int], value: bytes) -> None:
    assert zrpc.rpc_sync(1, echo, (value,)) == value
    with unasked(caller), faults.drop(caller, *way) as fault:
        future = zrpc.rpc_async(1, echo, (value,), timeout=0)
        until(lambda: fault.happened == 1)
    with pytest.raises(zrpc.RpcError, match=r"is lost.*may run twice"):
        future.wait()
    assert zrpc.rpc_sync(1, echo, (value,)) == value


@pytest.mark.system
def test_the_others_go_on(caller: Mesh) -> None:
    before = zrpc.rpc_async(1, wait, timeout=0)
    assert entered.wait(SOON)
    with unasked(caller), faults.drop(caller, 0, 1) as fault:
        lost = zrpc.rpc_async(1, echo, (1,), timeout=0)
        until(lambda: fault.happened == 1)
    with pytest.raises(zrpc.RpcError, match="is lost"):
        lost.wait()
    assert not before.done()
    gate.set()
    assert before.wait() == "done"


@pytest.mark.system
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


@pytest.mark.system
@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["question", "answer"])
def test_a_question_that_is_lost_is_asked_again(caller: Mesh, way: tuple[int, int]) -> None:
    future = zrpc.rpc_async(1, wait, timeout=0)
    assert entered.wait(SOON)
    heard = caller.agent(1).service(LossDetector)._copies
    with faults.drop(caller, *way) as fault:
        until(lambda: fault.happened == 1)
        number = heard.get((Kind.ROLL_CALL, 0), (0,))[0]
    until(lambda: heard.get((Kind.ROLL_CALL, 0), (0,))[0] > number + 1)
    gate.set()
    assert future.wait() == "done"


@pytest.fixture
def waiting_call(caller: Mesh) -> Iterator[PendingCall]:
    """A call of worker0 to worker1, who has it; nothing is asked of itself."""
    with unasked(caller):
        future = zrpc.rpc_async(1, wait, timeout=0)
        assert entered.wait(SOON)
        (call,) = caller.agent(0).caller.calls.in_flight()
        yield call
        gate.set()
        with contextlib.suppress(zrpc.RpcError):
            future.wait()


# More than those of questions that were asked before.
NUMBER = 1000


def claim(
    detector: LossDetector, number: int, *missing: int, way: int = 0, ways: int = 1, last: int = 0
) -> bool:
    """Worker1 claims, in answer to a question, not to have these calls; whether that counts.

    Args:
        detector: worker0's.
        number: of the question.
        missing: the calls.
        way: by which the claim comes.
        ways: by how many.
        last: the question that was asked last, where it is another one.
    """
    asked = detector._asked.setdefault(1, loss_detection._Question())
    asked.number = last or number
    body = loss_detection._HEAD.pack(number, way, ways, 0) + b"".join(
        map(loss_detection._CALL_ID.pack, missing)
    )
    detector._on_missing(Message(Kind.MISSING, body=body, sender=1))
    return asked.number == 0


def test_what_is_missing_once_is_not_lost(caller: Mesh, waiting_call: PendingCall) -> None:
    """It may have been read from a connection before that broke, and come later."""
    detector = caller.agent(0).service(LossDetector)
    settled: list[bool] = []

    def answers() -> None:
        mine, another = waiting_call.call_id, 2**60
        for number, missing in enumerate([(mine,), (), (another, mine), (another,), (mine,)]):
            assert claim(detector, NUMBER + number, *missing)
            settled.append(waiting_call.settled)
        assert claim(detector, NUMBER + 10, mine)
        settled.append(waiting_call.settled)

    in_io_thread(caller.agent(0), answers)
    assert settled == [False] * 5 + [True]


def test_a_word_that_comes_twice_counts_once(caller: Mesh, waiting_call: PendingCall) -> None:
    """By two ways, one must not do for the other; nor does an old one for a new one."""
    detector = caller.agent(0).service(LossDetector)
    counts: list[bool] = []

    def answers() -> None:
        mine = waiting_call.call_id
        for number in (NUMBER, NUMBER + 1):
            counts.extend(claim(detector, number, mine, way=0, ways=2) for _ in range(3))
        counts.append(claim(detector, NUMBER, mine, way=1, ways=2))
        counts.append(claim(detector, NUMBER + 1, mine, way=1, ways=2))
        counts.append(claim(detector, NUMBER + 1, mine, way=1, ways=2))
        counts.append(claim(detector, NUMBER + 2, mine, last=NUMBER + 3))

    in_io_thread(caller.agent(0), answers)
    assert counts == [False] * 7 + [True, False, False]
    assert not waiting_call.settled


class FullOutbox(Outbox):
    """One with a message that is still to be sent."""

    def __len__(self) -> int:
        return 1


def words_of(detector: LossDetector, monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """What it says from now on, which is not sent."""
    said: list[Kind] = []
    monkeypatch.setattr(detector, "_send", lambda rank, kind, *_: said.append(kind))
    return said


def test_a_worker_with_an_answer_still_to_send_says_nothing(
    caller: Mesh, waiting_call: PendingCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would say that it does not have the call, before the answer is there."""
    agent = caller.agent(1)
    detector = agent.service(LossDetector)
    said = words_of(detector, monkeypatch)
    body = loss_detection._CALL_ID.pack(2**60)

    def ask(number: int) -> None:
        question = loss_detection._HEAD.pack(number, 0, 1, 0) + body
        detector._on_roll_call(Message(Kind.ROLL_CALL, body=question, sender=0))

    with monkeypatch.context() as patch:
        patch.setattr(agent.outbox, "__class__", FullOutbox)
        in_io_thread(agent, lambda: ask(NUMBER))
        assert said == []
    in_io_thread(agent, lambda: ask(NUMBER + 1))
    assert said == [Kind.MISSING]


def test_what_has_not_left_is_not_asked_after(
    caller: Mesh, waiting_call: PendingCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = caller.agent(0)
    detector = agent.service(LossDetector)
    said = words_of(detector, monkeypatch)
    waiting_call.begun -= 1.0

    def look() -> None:
        detector._checked_at = 0.0
        detector.tick()
        detector._checked_at = math.inf

    with monkeypatch.context() as patch:
        patch.setattr(agent.outbox, "__class__", FullOutbox)
        in_io_thread(agent, look)
        assert said == []
    with monkeypatch.context() as patch:
        patch.setattr(waiting_call, "left", False)  # it waits for room
        in_io_thread(agent, look)
        assert said == []
    in_io_thread(agent, look)
    assert said == [Kind.ROLL_CALL]


def test_an_answer_is_waited_for_ever_longer(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = mesh.agent(0).service(LossDetector)
    asked: list[int] = []
    detector.timing = LossDetectionTiming(OFTEN, 4.0)
    with unasked(mesh), monkeypatch.context() as patch:
        patch.setattr(detector, "_send", lambda rank, kind, number, _: asked.append(number))
        often_asked = []
        for now in range(30):
            detector._ask(1, [1], float(now))
            often_asked.append(len(asked))
    assert often_asked == [1] * 4 + [2] * 8 + [3] * 16 + [4] * 2


@pytest.mark.parametrize("body", [b"", b"1" * 17, b"1" * 19])
def test_words_of_nonsense_are_refused(mesh: Mesh, body: bytes) -> None:
    detector = mesh.agent(0).service(LossDetector)
    with pytest.raises(ProtocolError, match="numbers of calls"):
        detector._on_missing(Message(Kind.MISSING, body=body, sender=1))


@pytest.mark.system
@pytest.mark.parametrize("size", [1, BULK_BYTES], ids=["small", "large"])
def test_a_service_is_notified_whose_messages_are_lost(caller: Mesh, size: int) -> None:
    """Also where they have no answer; they count as received then."""
    sender, receiver = caller.agent(0), caller.agent(1)
    for value in (SMALL, LARGE):
        assert zrpc.rpc_sync(1, echo, (value,)) == value
    told: list[int] = []
    probe = _Probe(receiver, told)
    receiver.services.append(probe)
    message = Message(Kind.CANCEL, 2**60, body=bytes(size))
    with faults.drop(caller, 0, 1) as fault:
        sender.outbox.post(1, message)
        until(lambda: fault.happened == 1)
    sender.outbox.post(1, message)
    probe.awaited = [MemberId(0)]
    until(lambda: bool(told))
    assert told == [0]
    for way, boxes in enumerate((sender.network._mailboxes, sender.network._bulk)):
        assert receiver.dispatcher.received_from(0, way) == boxes[1].sent
    receiver.services.remove(probe)


def test_what_is_short_for_a_moment_is_not_lost(caller: Mesh) -> None:
    """It may be under way by another connection."""
    agent = caller.agent(1)
    detector = agent.service(LossDetector)
    told: list[int] = []
    agent.services.append(_Probe(agent, told))
    sent = agent.dispatcher.received_from(0, 0)
    for short, at in [(2, 0.0), (2, 0.4), (0, 0.6), (3, 1.5), (3, 1.8), (1, 1.9)]:
        detector._compare_counts(0, 0, sent + short, at * OFTEN)
    assert told == []
    # Of three messages, two are missing for more than half of the time between two questions.
    for short, at in [(0, 2.0), (3, 3.0), (2, 3.4), (2, 3.6), (2, 4.8), (2, 5.6)]:
        detector._compare_counts(0, 0, sent + short, at * OFTEN)
    assert told == [0]
    assert agent.dispatcher.received_from(0, 0) == sent + 2


@pytest.mark.system
def test_nothing_is_asked_if_nothing_waits(caller: Mesh) -> None:
    detector = caller.agent(0).service(LossDetector)
    future = zrpc.rpc_async(1, wait)
    until(lambda: 1 in detector._asked)
    gate.set()
    assert future.wait() == "done"
    until(lambda: not detector._asked)


def test_it_is_not_kept_of_whom_is_gone(caller: Mesh) -> None:
    agent = caller.agent(0)
    detector = agent.service(LossDetector)
    future = zrpc.rpc_async(1, wait_until_cancelled)
    until(lambda: 1 in detector._asked)
    caller.agent(1).shutdown(graceful=False)
    with pytest.raises(zrpc.WorkerDied):
        future.wait()
    until(lambda: not detector._asked)
