"""Loss detection: a call that is lost fails, and no other call does.

Nothing is kept for messages without an answer that are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

import zrpc
from tests.services.inspection.doors import knock
from tests.support.gates import Gate
from tests.support.io_threads import await_io_thread
from tests.support.observed import ask_often, busy, stats_of
from tests.support.refusals import refusing
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.agent.shutdown import Shutdown
from zrpc.calls.outbox import Outbox
from zrpc.services.inspection.service import InspectionService
from zrpc.testing import Mesh, faults
from zrpc.transport.network import BULK_BYTES
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

pytestmark = [
    pytest.mark.system,
    pytest.mark.zrpc(workers=2, faults=True, options={"shared_memory": 0}),
]

OFTEN = 0.05
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
def often(mesh: Mesh) -> None:
    ask_often(mesh, OFTEN)


def echo_late(value: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return value


@contextlib.contextmanager
def unasked(mesh: Mesh, caller: int = 0, callee: int = 1) -> Iterator[None]:
    """Meanwhile the caller asks nothing, so that no fault meets a question or its answer."""
    rules = mesh.agent(caller).service(InspectionService).rules
    rules.seconds = math.inf
    await_io_thread(mesh.agent(caller))
    # Behind a question that was asked just before.
    mesh.run(caller, zrpc.rpc_sync, callee, echo, (SMALL,))
    try:
        yield
    finally:
        rules.seconds = OFTEN
        rules.forget(MemberId(callee))  # also a question that was answered meanwhile


@contextlib.contextmanager
def losing(
    mesh: Mesh, sender: int = 0, receiver: int = 1, *, caller: int = 0, callee: int = 1
) -> Iterator[None]:
    """Loses the message that is sent in the block."""
    with unasked(mesh, caller, callee), faults.drop(mesh, sender, receiver) as fault:
        yield
        until(lambda: fault.happened == 1)


@pytest.mark.parametrize("value", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["call", "answer"])
def test_a_wait_for_a_lost_message_fails_and_others_go_on(
    caller: Mesh, door: Gate, way: tuple[int, int], value: bytes
) -> None:
    before = zrpc.rpc_async(1, knock, timeout=0)
    door.await_entry()
    assert zrpc.rpc_sync(1, echo, (value,)) == value
    with unasked(caller), faults.drop(caller, *way) as fault:
        future = zrpc.rpc_async(1, echo, (value,), timeout=0)
        until(lambda: fault.happened == 1)
    with pytest.raises(zrpc.RpcError, match=r"is lost.*may run twice"):
        future.wait()
    assert zrpc.rpc_sync(1, echo, (value,)) == value
    assert not before.done()
    door.open()
    assert before.wait() == "in"


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


@contextlib.contextmanager
def no_descriptors(mesh: Mesh, sender: int, receiver: int) -> Iterator[threading.Event]:
    """Refuses to send from a worker to another; the event is set when it has."""
    refused = threading.Event()

    def error_for(peer: int, _: bytes) -> Exception | None:
        if peer != receiver:
            return None
        refused.set()
        return zmq.ZMQError(errno.EMFILE)

    with refusing(mesh.agent(sender), error_for):
        yield refused


def test_an_answer_that_waits_for_descriptors_is_not_lost(caller: Mesh) -> None:
    """Else the callee would say that it does not have the call."""
    with no_descriptors(caller, 1, 0) as refused:
        future = zrpc.rpc_async(1, echo, (1,), timeout=0)
        assert refused.wait(SOON)
        time.sleep(10 * OFTEN)  # several questions
        assert not future.done()
    assert future.wait() == 1


def test_nothing_is_asked_while_messages_wait_for_descriptors(caller: Mesh) -> None:
    with unasked(caller), faults.drop(caller, 0, 1) as fault:
        future = zrpc.rpc_async(1, echo, (1,), timeout=0)
        until(lambda: fault.happened == 1)
        with no_descriptors(caller, 0, 1) as refused:
            caller.agent(0).outbox.post(MemberId(1), Message(Kind.CANCEL, 2**60))
            assert refused.is_set()
            caller.agent(0).service(InspectionService).rules.seconds = OFTEN
            time.sleep(10 * OFTEN)
            assert not future.done()
    with pytest.raises(zrpc.RpcError, match="is lost"):
        future.wait()


@pytest.mark.zrpc(options={"shared_memory": 0, "max_bytes_in_flight": 10_000})
def test_what_waits_for_room_is_not_lost(caller: Mesh, door: Gate) -> None:
    first = zrpc.rpc_async(1, knock, timeout=0)
    door.await_entry()
    second = caller.submit(0, zrpc.rpc_sync, 1, len, (bytes(9_990),), timeout=0)
    time.sleep(10 * OFTEN)  # several questions
    assert not second.done()
    door.open()
    assert (first.wait(), second.result(SOON)) == ("in", 9_990)


def test_words_of_nonsense_are_refused(caller: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    bodies = (b"", b"1" * 17, struct.pack("<QBBQ", 7, 0, 1, 0) + b"x")
    words = itertools.product((Kind.ASK, Kind.TELL), bodies)
    for number, (kind, body) in enumerate(words, 1):
        caller.agent(1).outbox.post(MemberId(0), Message(kind, body=body))
        until(lambda: caplog.text.count("ProtocolError: expected") == number)  # noqa: B023


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
    received = sum(receiver.dispatcher.received_from(MemberId(0), way) for way in (0, 1))
    assert received == sender.network.sent([1])
    receiver.services.remove(probe)


@zrpc.actor
class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


def test_a_lost_call_of_an_actor_holds_up_those_behind_it_only_until_it_is_found(
    caller: Mesh,
) -> None:
    counter = zrpc.remote(1, Counter)
    assert counter.rpc_sync().add(1) == 1
    with unasked(caller), faults.drop(caller, 0, 1) as fault:
        lost = counter.rpc_async().add(10)
        until(lambda: fault.happened == 1)
    with pytest.raises(zrpc.RpcError, match="is lost"):
        lost.wait()
    assert [counter.rpc_sync().add(1) for _ in range(2)] == [2, 3]


@pytest.mark.parametrize("error", ["is lost", "RPC ran for more than"])
def test_an_item_goes_back_to_its_queue_if_the_answer_with_it_is_lost(
    caller: Mesh, error: str
) -> None:
    queue = zrpc.remote(1, zrpc.Queue)
    queue.rpc_sync().put("item")
    with unasked(caller), faults.drop(caller, 1, 0) as fault:
        taking = queue.rpc_async(timeout=0 if error == "is lost" else 1).get()
        until(lambda: fault.happened == 1)
        if error != "is lost":
            until(taking.done)
    with pytest.raises(zrpc.RpcError, match=error):
        taking.wait()
    assert queue.rpc_sync().get() == "item"
    queue.rpc_sync().close()
    with pytest.raises(zrpc.QueueClosed):
        queue.rpc_sync().get()


@pytest.mark.parametrize("use", [lambda rref: rref.to_here(), lambda rref: rref.rpc_sync().get(1)])
def test_who_waits_for_a_value_gets_an_error_if_the_call_that_makes_it_is_lost(
    caller: Mesh, use: Callable[[Any], Any]
) -> None:
    with losing(caller):
        rref = zrpc.remote(1, dict, timeout=0)
    with pytest.raises(zrpc.RpcError, match="never made on worker1"):
        use(rref)
    with losing(caller, 1, 0):  # its answer: the value is made, and stays
        rref = zrpc.remote(1, dict, timeout=0)
    until(rref.confirmed_by_owner)
    assert zrpc.rpc_sync(1, use_here, (rref,)) == {}


def use_here(rref: zrpc.RRef[Any]) -> Any:
    return rref.to_here()


@pytest.mark.zrpc(workers=3)
@pytest.mark.parametrize(
    ("way", "error"),
    [((1, 2), "a call to .* is lost"), ((2, 1), "whether an actor has its name")],
    ids=["call", "answer"],
)
def test_the_maker_of_an_actor_with_a_name_does_not_wait_for_a_lost_message(
    mesh: Mesh, way: tuple[int, int], error: str
) -> None:
    """Beside worker0, which grants names."""
    with losing(mesh, *way, caller=1, callee=2):
        making = mesh.submit(1, zrpc.remote, 2, Counter, timeout=0, name="counter")
    with pytest.raises(zrpc.RpcError, match=error):
        making.result(SOON)


# What loses a message without an answer.


async def never() -> None:
    await asyncio.sleep(1000)


def numbers() -> Iterator[int]:
    yield from itertools.count()


def lose_cancellation(mesh: Mesh) -> None:
    future = zrpc.rpc_async(1, never, timeout=0)
    until(lambda: busy(mesh))
    with losing(mesh):
        future.cancel()


def lose_cancellation_of_actor(mesh: Mesh) -> None:
    waiter = zrpc.remote(1, Waiter)
    future = waiter.rpc_async(timeout=0).wait()
    until(lambda: busy(mesh))
    with losing(mesh):
        future.cancel()
    check_often(mesh)
    assert waiter.rpc_sync().name() == "waiter"  # which the lost one no longer holds up


def lose_close(mesh: Mesh) -> None:
    stream = zrpc.rpc_stream(1, numbers, timeout=0, prefetch=2)
    assert [next(stream) for _ in range(2)] == [0, 1]
    with losing(mesh):
        stream.close()


def lose_end_of_context(mesh: Mesh) -> None:
    with contextlib.ExitStack() as lost, zrpc.autograd.context():
        zrpc.rpc_sync(1, echo, (torch.ones(2, requires_grad=True),))
        lost.enter_context(losing(mesh))


def lose_end_of_rref(mesh: Mesh) -> None:
    rref = zrpc.remote(1, dict)
    rref.to_here()
    with losing(mesh):
        del rref


@zrpc.actor
class Waiter:
    async def wait(self) -> None:
        await never()

    def name(self) -> str:
        return "waiter"


def check_often(mesh: Mesh) -> None:
    for name in mesh:
        mesh.agent(name).service(InspectionService).rules.check_seconds = OFTEN


LOSE = [
    lose_cancellation,
    lose_cancellation_of_actor,
    lose_close,
    lose_end_of_context,
    lose_end_of_rref,
]


@pytest.mark.parametrize("lose", LOSE)
def test_nothing_is_kept_if_a_message_without_an_answer_is_lost(
    caller: Mesh, lose: Callable[[Mesh], None]
) -> None:
    lose(caller)
    check_often(caller)

    def kept() -> list[int]:
        stats = stats_of(caller, 1)
        return [stats.requests_in_progress, stats.rrefs_owned, stats.autograd_contexts]

    until(lambda: not any(kept()), lambda: f"kept {kept()}")


@pytest.mark.parametrize("lose", [lose_cancellation, lose_close])
def test_a_graceful_shutdown_does_not_wait_for_what_a_lost_message_was_to_end(
    caller: Mesh, lose: Callable[[Mesh], None]
) -> None:
    lose(caller)
    shutdowns = [caller.submit(rank, zrpc.shutdown, timeout=SOON) for rank in range(2)]
    assert [each.result(SOON) for each in shutdowns] == [None, None]


@pytest.mark.parametrize("all_leave", [False, True])
def test_nothing_is_asked_once_all_leave(mesh: Mesh, all_leave: bool) -> None:
    """A peer may have left already: then the question would hold up this worker's end."""
    agent, made = mesh.agent(0), []
    leaving = Shutdown(agent.membership, lambda *_: None)
    leaving.done = all_leave
    outbox = Outbox(agent.network, agent.membership, agent.receiver.in_io_thread, leaving)

    def first_frame(*ways: int) -> bytes:
        made.append(ways)
        return Message(Kind.CANCEL, 2**60).first_frame()

    outbox.post_each_way(MemberId(1), first_frame)
    assert bool(made) is not all_leave
