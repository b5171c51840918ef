"""Takes the items of one stream, at the worker that has called its generator.

Batches arrive in the thread that receives, which must not unpickle them. The thread, or the task,
that wants an item opens a batch, and then takes item by item from a deque.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.pending_call import PendingCall
from zrpc.errors import RpcTimeoutError
from zrpc.runtime.interrupts import raise_if_of_handler, run_interruptibly, uninterrupted
from zrpc.services.streams.batches import Credit, parts_of
from zrpc.services.streams.inflow import Inflow
from zrpc.services.streams.source import Source
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message

T = TypeVar("T")


class Consumer(Source):
    """The items of one stream that have come. Any thread may call its methods.

    Args:
        agent: this worker's.
        call: the call of the generator.
        inflow: the rules.
        timeout: the longest wait for an item, in seconds; 0 means no limit.
        ended: called when nothing more can arrive.

    Attributes:
        call, inflow: the same.
        returned: whether the function was no generator, and its value is the outcome.
        reader: what reads it: itself, or one that reads several together.
        place: which of those it is.
        asked: for how long the reader had waited when it last gave an item; see `Source.waited`.
    """

    returned = False
    place = 0
    asked = 0.0

    def __init__(
        self,
        agent: Agent,
        call: PendingCall,
        inflow: Inflow,
        timeout: float,
        ended: Callable[[Consumer], None],
    ) -> None:
        super().__init__(agent, timeout)
        self.call = call
        self.is_local = call.peer == agent.membership.own_id
        self.reader: Any = self
        self._ended = ended
        self.inflow = inflow  # guarded by the lock; nothing is freed while that is held
        self._opening = False  # whether a reader opens a batch; that one resets it, without a lock

    @property
    @override
    def title(self) -> str:
        """What it is called in messages to people."""
        return f"{self.call.title} on {self._agent.membership.infos[self.call.peer].name}"

    @override
    def opened(self) -> list[Consumer]:
        """Returns itself."""
        return [self]

    def follow(self, reader: Source, place: int) -> None:
        """Leaves it to another one to read this; notifies it now, as something may have arrived."""
        self.asked = reader.waited()
        self.reader, self.place = reader, place
        self.reader.notify(self)

    def notify(self, _: Consumer) -> None:
        """Learns that something has arrived. In any thread, also the one that receives."""
        self.wake()

    # -- in the I/O thread -----------------------------------------------------------------

    def arrive(self, batch: Message) -> None:
        """Takes a batch that has arrived."""
        self._post(self._change(partial(self._add, batch)))

    def _add(self, batch: Message) -> Credit | None:
        self.inflow.arrive(batch)
        return self.inflow.credit(len(self.items), always=True)

    def on_settled(self, call: PendingCall) -> None:
        """Takes the answer of the call, or the error that came instead."""
        [outcome] = call.outcome
        total = None
        if isinstance(outcome, Message):
            [total] = (outcome.attachments or {}).get(Tag.STREAM, [None])
            self.returned = total is None and outcome.kind != Kind.ERROR
        self.end(outcome, total)
        call.claim()

    def end(self, outcome: Any, total: int | None = None) -> None:
        """Ends the stream, after its batches; see `Inflow.end`. In any thread."""
        self._change(partial(self.inflow.end, outcome, total))

    def _change(self, change: Callable[[], T]) -> T:
        """Returns what ``change()`` does, which takes what has come; then notifies the reader."""
        try:
            with self._lock:
                value = change()
            if self.inflow.complete:
                self._ended(self)
        except Exception as error:  # no memory for a frame, say: they would wait for what has come
            self.close(error)
            raise
        finally:
            self.reader.notify(self)
        return value

    def _post(self, credit: Credit | None) -> None:
        if credit is not None:
            self._agent.outbox.post(self.call.peer, credit.dump(self.call.call_id))

    # -- in any thread ---------------------------------------------------------------------

    @override
    def close(self, outcome: Exception | None = None) -> None:
        """Ends the stream at once, here and at the producer.

        Args:
            outcome: the error to raise from now on; None if there are just no more items.
        """
        with uninterrupted:
            with self._lock:
                if self.inflow.over and self.call.settled and not self.items:
                    return  # there is nothing left to end
                dropped: list[Any] = [*self.items]
                self.items.clear()
                if not self.inflow.over:
                    dropped.append(self.inflow.abort(outcome))
            self._ended(self)
            self.reader.notify(self)
            self.call.cancel()

    # -- in the thread that wants items ----------------------------------------------------

    @override
    def _begin(self) -> None:
        super()._begin()
        if not self._waits:  # one that polls may do so for as long as it likes
            self.asked = self._waited_before

    @override
    def _wait(self, gate: threading.Lock, seconds: float | None) -> None:
        call, ident = self.call, threading.get_ident()
        call.waiters = (*call.waiters, ident)  # for `zrpc stacks`
        try:
            super()._wait(gate, seconds)
        finally:
            call.waiters = tuple(each for each in call.waiters if each != ident)

    def timed_out(self) -> RpcTimeoutError:
        """Returns the error of an item that has taken too long."""
        call, callees = self.call, self._agent.callees
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({self._timeout * 1000:.0f} ms) and will now be "
            f"marked with an error: no item of the stream {self.call.title} has come "
            f"from {callees.describe(call.peer)}"
            f"{callees.explain(call.peer, call.call_id)}. The timeout is for each item: pass a "
            "longer one, or 0 for no limit. The stream is closed"
        )

    @override
    def has_items(self) -> bool:
        """Returns whether there are items; opens the next batch if it has arrived.

        If a signal handler raises meanwhile, the batch is opened again by the next reader.

        Raises:
            StopIteration: there are none left; it has the value that the function has returned.
            Exception: what has ended the stream.
        """
        with uninterrupted:
            with self._lock:
                if self.items:
                    return True
                if self._opening:
                    return False
                batch, over = self.inflow.first(), self.inflow.over
                self._opening = batch is not None
                credit = None if self._opening or over else self.inflow.credit(0)
            self._post(credit)  # before the program waits
            if batch is not None:
                values: list[Any] = []
                try:
                    failure = run_interruptibly(self._unpack, batch, values)
                    self._open(batch, values, failure)
                finally:
                    self._opening = False
                    self.reader.notify(self)
        if batch is None and over:
            raise StopIteration(self._value())
        return bool(self.items)

    def _value(self) -> Any:
        """Returns the value of the outcome, or raises its error."""
        [outcome] = self.inflow.outcome
        try:
            return None if outcome is None else self._agent.caller.decode(outcome)
        except (StopIteration, StopAsyncIteration) as error:  # as in any generator
            raise RuntimeError(
                f"the function of the stream {self.call.title} raised {error!r}"
            ) from error

    def _unpack(self, batch: Message, values: list[Any]) -> Exception | None:
        """Adds the items of a batch to ``values``; returns what was raised by the next one."""
        unpack = self._agent.codec.unpack
        try:
            for count, part in parts_of(batch):
                if count:
                    values.extend(unpack(part))
                else:
                    values.append(unpack(part))
        except Exception as error:
            raise_if_of_handler(error)
            return error
        return None

    def _open(self, batch: Message, values: list[Any], failure: Exception | None) -> None:
        """Lets the program take the items of a batch; a failure ends the stream behind them."""
        dropped: object = None
        with self._lock:
            if self.inflow.first() is not batch:  # it was closed meanwhile
                return
            self.inflow.open(len(values))
            self.items.extend(values)
            self.asked = self.reader.waited()  # nobody waits as long as there are items
            credit = self.inflow.credit(max(0, len(values) - 1))
            if failure is not None:
                dropped = self.inflow.abort(failure.with_traceback(None))
        if failure is None:
            self._post(credit)
        else:
            self._ended(self)
            self.call.cancel()
        del dropped

    @override
    def is_ready(self) -> bool:
        """Returns whether there are items, or a batch or an end that nobody opens yet.

        Without the lock: whatever changes meanwhile, the reader is notified of it afterwards.
        """
        return bool(self.items) or (self.inflow.ready and not self._opening)
