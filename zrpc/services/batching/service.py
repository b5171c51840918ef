"""Gathers the calls of batched functions on one worker, and runs them together."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Hashable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.batch_values import form_of
from zrpc.calls.callee import TakeOver
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.current_device import current_device, device_of
from zrpc.calls.execution import Execution
from zrpc.calls.pending_call import NEVER
from zrpc.calls.result_sink import ResultSink
from zrpc.errors import RpcCancelledError
from zrpc.functions import Batching, Deferral
from zrpc.runtime.alarm import Alarm
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.batching.batch import Batch, BatchedCall
from zrpc.services.batching.gathering import Gathering
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message


class _Key(NamedTuple):
    """What is equal for calls that may be in one batch.

    Attributes:
        token: of the function.
        receiver: the id of the object of a method. It is unique while a call keeps the object.
        form: of the arguments.
        contexts: the autograd context, for example.
        method: the name of the function.
        mailbox: of the actor whose method it is; None if it is no actor's.
    """

    token: str
    receiver: tuple[int, ...]
    form: Hashable
    contexts: tuple[Any, ...]
    method: str
    mailbox: Any


_Waiting = Gathering[BatchedCall]


class BatchingService(Service):
    """Plugs batches into an agent.

    A call that waits for its batch counts as one whose function has returned a future: it takes no
    thread, and a shutdown waits for it. How much waits is bounded by the flow control of the
    callers.

    In an actor, a run is one call: it waits in the mailbox for its turn. The calls that it takes
    have left the mailbox before.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # Guards what waits; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self._gatherings: dict[_Key, _Waiting] = {}
        self._alarm = Alarm(agent.event_loop, self._order_due)

    @override
    def deferrals(self) -> Mapping[type[Deferral], TakeOver]:
        return {Batching: self._gather}

    def _gather(
        self, request: Message, sink: ResultSink, batching: Batching, call: tuple[Any, Any, Any]
    ) -> None:
        """Adds a call to those that wait; in the thread that has unpickled it."""
        function, args, kwargs = call
        if isinstance(function, MethodType):
            receiver: tuple[Any, ...] = (function.__self__,)
        else:
            receiver = batching.receiver(args)
            args = args[len(receiver) :]
        form = form_of((args, kwargs), batching.stack)
        contexts, mailbox = self.agent.codec.contexts(), request.scope.mailbox
        name = getattr(batching.fn, "__name__", "")
        key = _Key(batching.token, tuple(map(id, receiver)), form, contexts, name, mailbox)
        context = contextvars.copy_context()
        waiting = BatchedCall(request, sink, batching, receiver, args, kwargs, context)
        request.scope.outcome_from = "its batch"
        sink.defer(request)
        with self._lock:
            gathering = self._gatherings.get(key)
            if gathering is None:
                gathering = _Waiting(batching.max_size, batching.max_wait, key)
                self._gatherings[key] = gathering
            full, due = gathering.add(waiting, time.monotonic()), gathering.due()
        request.scope.when_cancelled(partial(self._leave, gathering, waiting))
        if full:
            self._order(gathering)
        self._alarm.set(NEVER if due is None else due)

    def _order_due(self) -> float:
        """Orders the runs that are due, in the event loop's thread; returns when the next is."""
        now, ordered, next_due = time.monotonic(), [], NEVER
        with self._lock:
            for gathering in self._gatherings.values():
                while (due := gathering.due()) is not None and gathering.expire(now):
                    ordered.append(gathering)
                next_due = min(next_due, NEVER if due is None else due)
        for gathering in ordered:
            self._order(gathering)
        return next_due

    def _leave(self, gathering: _Waiting, call: BatchedCall) -> None:
        """Removes a call whose caller no longer waits; mostly in the I/O thread."""
        with self._lock:
            gathering.remove(call)
            self._tidy(gathering)

    def _order(self, gathering: _Waiting) -> None:
        """Starts a run when there is a thread for it, and in an actor when it is its turn."""
        turn = Message(Kind.METHOD, sender=self.agent.worker_info.member_id)
        turn.scope = CancelScope(self.agent.worker_info, 0)
        begin = partial(self.agent.receiver.run, partial(self._run, gathering, turn))
        mailbox = gathering.key.mailbox
        if mailbox is None:
            begin()
        else:
            call = turn, begin, partial(self._refuse, gathering)
            mailbox.do(mailbox.arrive(call, method=gathering.key.method))

    def _run(self, gathering: _Waiting, turn: Message) -> None:
        """Calls the function for those that wait, as one call; in a thread of the pool."""
        scope, mailbox = turn.scope, gathering.key.mailbox
        scope.begin()
        if mailbox is not None:
            mailbox.do(mailbox.on_begun(scope))

        def end() -> None:
            if mailbox is not None:
                mailbox.do(mailbox.end(scope))

        live = []
        for call in self._take(gathering):
            if call.request.scope.begin():
                live.append(call)
            else:
                gone = RpcCancelledError("the caller no longer waits for the answer")
                call.sink.fail(call.request, gone)
        if not live:
            end()
            return
        batch = Batch(turn, live, end)
        loop, run = self.agent.event_loop, self.agent.receiver.run
        with current_device(device_of(turn)):
            batch.context.run(Execution(turn, batch, batch.resolve, loop, run))

    def _refuse(self, gathering: _Waiting, error: BaseException) -> None:
        """Refuses those that wait: the actor is stopped, or its mailbox full."""
        for call in self._take(gathering):
            call.sink.refuse(call.request, error)

    def _take(self, gathering: _Waiting) -> list[BatchedCall]:
        with self._lock:
            calls = gathering.take()
            self._tidy(gathering)
        for call in calls:
            self.agent.callee.requests.resume(call.request)
        return calls

    def _tidy(self, gathering: _Waiting) -> None:
        """Forgets a gathering in which nothing waits; the lock is held."""
        if gathering.idle and self._gatherings.get(gathering.key) is gathering:
            del self._gatherings[gathering.key]

    @override
    def tick(self) -> None:
        """Refuses the calls that wait for a batch of an actor which was stopped."""
        with self._lock:
            ordered = [
                each
                for each in self._gatherings.values()
                if each.key.mailbox is not None and each.key.mailbox.stopped is not None
                for _ in range(each.order_all())
            ]
        for gathering in ordered:
            self._order(gathering)

    @override
    def close(self) -> None:
        with self._lock:
            self._gatherings.clear()
