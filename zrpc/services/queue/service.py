"""Serves the calls of other workers to the queues of this one.

A call that has to wait counts as one whose function has returned a future: it takes no thread.

**Receipts.** An answer that brings items asks for a receipt: its receiver says whether a call still
waited for the answer, and has it now. The receipt is sent before any other thread of the receiver
can have the items, but for a moment; if a task of asyncio awaits them, or a thread waits for the
call, when it has gone on. Until it comes, the owner keeps the items. They go back to the front of
the queue if the answer was not sent or is lost, if the call was cancelled or had timed out before
it arrived, if the task was cancelled or the thread interrupted before it went on, or if the worker
dies first. So no item is lost with a call that does not take it, and no item has two takers that
live, unless one was paused until it counted as dead. If a connection breaks, and messages of the
taker may be lost, what it was sent counts as taken. A closed queue fails calls that wait for items
only once no item can come back.

An item that can't be pickled, which only the owner itself can put, is lost: its taker gets the
error. The others of its batch go back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.callee import TakeOver
from zrpc.calls.execution import RequestJob
from zrpc.calls.pending_call import NEVER
from zrpc.calls.result_sink import ResultSink
from zrpc.errors import QueueClosed, RpcError
from zrpc.functions import Deferral
from zrpc.runtime.alarm import Alarm
from zrpc.services.queue.contents import Item, Waiter, late, nothing
from zrpc.services.queue.queue import Queue, QueueCall
from zrpc.services.queue.size import measure
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# After all workers have called ``shutdown``, calls that wait end once no item has come for this
# time: those that are on their way still count.
_QUIET_SECONDS = 0.5


class QueueService(Service):
    """Plugs queues into an agent."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # What was sent and has no receipt, by the taker's call. Single operations are atomic.
        self._sent: dict[tuple[MemberId, int], tuple[Queue[Any], list[Item]]] = {}
        # The calls that wait. Also atomic.
        self._waiting: dict[Waiter, Queue[Any]] = {}
        self._queues: WeakSet[Queue[Any]] = WeakSet()
        self._used_at = 0.0  # when a call has come
        # The items that were taken. Finalizers are the program's code, so the pool frees them.
        self._taken: deque[list[Item]] = deque()
        self._alarm = Alarm(agent.event_loop, self._end_late)

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.TAKEN: self._on_taken}

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.RECEIPT: self._receipt}

    @override
    def deferrals(self) -> Mapping[type[Deferral], TakeOver]:
        return {QueueCall: self._take_over}

    # -- a call --------------------------------------------------------------------------

    def _take_over(
        self, request: Message, sink: ResultSink, call: QueueCall, target: tuple[Any, Any, Any]
    ) -> None:
        """Lets a call put or take, now or later; in the thread that has unpickled it."""
        self._taken.clear()
        method, args, kwargs = target
        queue: Queue[Any] = method.__self__
        waiter = call.waiter(queue, *args, **kwargs)
        self._check(request, waiter)
        waiter.done = partial(self._answer_later, request, sink, queue)
        self._queues.add(queue)
        self._used_at = now = time.monotonic()
        waiter.due = NEVER if waiter.timeout is None else now + waiter.timeout
        self._waiting[waiter] = queue
        at_once = queue.contents.add(waiter)
        if (mailbox := request.scope.mailbox) is not None:
            mailbox.do(mailbox.end(request.scope))  # the next call need not wait for the answer
        if at_once:
            self._waiting.pop(waiter, None)
            self._answer(request, sink, queue, waiter)
            return
        request.scope.outcome_from = "an item" if waiter.most else "room in the queue"
        sink.defer(request)
        request.scope.when_cancelled(partial(self._leave, queue, waiter))
        self._alarm.set(waiter.due)

    def _end_late(self) -> float:
        """Ends the calls that have waited for as long as they may; in the event loop's thread."""
        now = time.monotonic()
        waiting = list(self._waiting.items())
        for waiter, queue in waiting:
            if waiter.due <= now:
                queue.contents.remove(waiter, late(waiter))
        return min((waiter.due for waiter, _ in waiting if waiter.due > now), default=NEVER)

    def _check(self, request: Message, waiter: Waiter) -> None:
        """Raises an error if a call can't be served."""
        if waiter.most and request.scope.must_run:
            raise RpcError(
                "an item can't be taken by remote(), whose caller may be gone when it comes: use "
                "rpc_sync() or rpc_async()"
            )
        in_context = not waiter.most and self.agent.codec.in_context(request)
        if in_context and measure(waiter.items[0].value)[1]:
            raise RpcError(
                "expected an item without gradients, found a tensor that needs them, in an "
                "autograd context: a queue carries no gradients, so put tensor.detach()"
            )

    def _leave(self, queue: Queue[Any], waiter: Waiter) -> None:
        self._waiting.pop(waiter, None)
        queue.contents.remove(waiter)

    def _answer_later(
        self, request: Message, sink: ResultSink, queue: Queue[Any], waiter: Waiter
    ) -> None:
        self._waiting.pop(waiter, None)
        answer = partial(self._answer, sink=sink, queue=queue, waiter=waiter)
        self.agent.receiver.run(RequestJob(request, sink.fail, answer))

    def _answer(
        self, request: Message, sink: ResultSink, queue: Queue[Any], waiter: Waiter
    ) -> None:
        """Answers a call; in a thread of the pool."""
        if isinstance(waiter.error, QueueClosed):
            sink.refuse(request, waiter.error)  # the call may be made again, to another queue
            return
        if waiter.error is not None:
            sink.fail(request, waiter.error, False)  # an empty queue is nothing to log
            return
        if not waiter.most:
            sink.answer(request, None)
            return
        key = request.sender, request.call_id
        value, items = waiter.result(), waiter.items
        # The scope of the request refers to the waiter, so the two would keep the items.
        waiter.items, waiter.done = [], nothing
        self._sent[key] = queue, items
        sent = self.agent.callee.answer(request, value, (Tag.RECEIPT, b""))
        lost = self.agent.membership.lost
        gone = request.sender in lost if sent else request.scope.cancelled
        if gone:
            self._settle(key, False)
        elif not sent:  # an item can't be pickled: its taker has the error
            self._sent.pop(key, None)
            back = [each for each in items if self._can_be_sent(request, each)]
            queue.contents.give_back(back)
            queue.contents.note_taken(len(items) - len(back))

    def _can_be_sent(self, request: Message, item: Item) -> bool:
        encoder = self.agent.codec.answer_encoder(request)
        try:
            encoder.pack(item.value, Message(Kind.RESULT))
        except BaseException:  # as what it raised before
            return False
        finally:
            encoder.abort()
        return True

    # -- receipts, in the I/O thread -----------------------------------------------------

    def _receipt(self, answer: Message, _: bytes) -> Any:
        """Returns what sends the receipt of an answer, once it is known who has it."""
        return partial(self._send_receipt, answer.sender, answer.call_id)

    def _send_receipt(self, owner: MemberId, call_id: int, taken: bool) -> None:
        self.agent.outbox.post(owner, Message(Kind.TAKEN, call_id, body=bytes([taken])))

    def _on_taken(self, message: Message) -> None:
        self._settle((message.sender, message.call_id), bytes(message.body) != b"\0")

    def _settle(self, key: tuple[MemberId, int], taken: bool) -> None:
        """Notes, once, that the items of an answer are taken, or puts them back to the front."""
        queue, items = self._sent.pop(key, (None, []))
        if queue is None:
            return
        if taken:
            self._taken.append(items)
            queue.contents.note_taken(len(items))
        else:
            queue.contents.give_back(items)

    # -- events of the agent -------------------------------------------------------------

    @override
    def on_member_lost(self, member: MemberId) -> None:
        back: dict[Queue[Any], list[Item]] = {}
        for key in [key for key in list(self._sent) if key[0] == member]:
            queue, items = self._sent.pop(key, (None, []))
            if queue is not None:
                back.setdefault(queue, []).extend(items)
        for queue, items in back.items():
            queue.contents.give_back(items)

    @override
    def on_cancelled(self, member: MemberId, call_id: int) -> None:
        # The answer may be lost. If it isn't, it comes too late, and the receipt says the same.
        self._settle((member, call_id), False)

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        for key in [key for key in list(self._sent) if key[0] == member]:
            self._settle(key, True)

    @override
    def awaited_members(self) -> Collection[MemberId]:
        return {member for member, _ in list(self._sent)}

    @override
    def idle(self) -> bool:
        return not self._sent

    @override
    def tick(self) -> None:
        """Frees what was taken. Ends the calls that wait, once no worker will put or take more."""
        if self._taken:
            self.agent.receiver.run(self._taken.clear)
        if not self._waiting or not self.agent.graceful_shutdown.ends_waits:
            return
        if time.monotonic() - self._used_at > _QUIET_SECONDS:
            for waiter, queue in list(self._waiting.items()):
                what = "put an item" if waiter.most else "make room in the queue"
                why = f"no worker will {what}: all have called shutdown, or this one leaves"
                queue.contents.remove(waiter, QueueClosed(why))

    @override
    def close(self) -> None:
        self._waiting.clear()
        self._sent.clear()
        for queue in list(self._queues):  # threads of this process may wait for one
            queue.contents.close(at_once=True)
