"""Which call of an actor begins next. No I/O: events go in, and what may be done comes out.

An actor has *lanes*: one for all methods that run one at a time (or as many as the actor says), and
one for each method that is marked ``zrpc.concurrent``. A call waits in its lane until fewer calls
than the lane's limit run there.

**Order.** Calls of one worker begin in the order in which they were made, although large messages
may be overtaken by later ones. So each call has a number, which begins at 0 in each *series* of its
caller. A call whose number is not next is held until the ones before it have come.

The caller draws the number as the last thing before the message is sent: the arguments are pickled
by then, and the call is in the table of calls. Calls to actors don't wait for flow control, so
nothing lies between the two at which another thread could overtake. A number whose message is not
sent after all (the call was cancelled in that moment, or there was no memory) is reported by the
caller, and ``skip`` counts it as passed. If the owner has read only the head of a message in
chunks, it tells the caller so, which then does the same. A number whose message is lost with a
connection never comes, although those behind it have: so the caller's answers to questions say,
``on_answered``. If such a message arrives after all, its call is out of order.

A series lasts as long as the caller has an RRef to the actor, and each call keeps one until it has
an outcome. So when the next series begins, no call of the one before is waited for any longer. What
a lost worker has called is abandoned.

A call that is abandoned while it waits is left out when its turn comes. Its number was passed as it
arrived, so it leaves no gap.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from zrpc.agent.service import LOST_AFTER_ANSWERS
from zrpc.calls.cancel_scope import CancelScope
from zrpc.wire.message import Message

# A series of the caller's, and the number in it.
Turn = tuple[int, int]
# Begins at once, and has no place in the order.
BESIDE: Turn = (0, 0)
# What a call that waits occupies beside its message, in bytes.
_ENTRY_BYTES = 2048


# A call: its request, what begins it, and what refuses it with an error. And one that waits, with
# its size when it came: the message of an abandoned call is freed.
Call = tuple[Message, Callable[[], None], Callable[[BaseException], None]]
_Entry = tuple[Call, int]


@dataclass(slots=True, eq=False)
class _Lane:
    """Calls that run at once, in a limited number.

    Attributes:
        limit: the number; 0 means no limit.
        ordered: whether the next call begins only after the function of the one before was called.
            If one runs at a time, it needs no order beside that.
        starting: the scope of a call whose function was not called yet, in an ordered lane.
    """

    limit: int
    ordered: bool = False
    running: int = 0
    starting: CancelScope | None = None
    waiting: deque[_Entry] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Order:
    """How far the calls of one worker have come, in a series.

    Attributes:
        next: the number of the next one.
        held: the calls that came too early, by number; None for a number that has passed.
        answers: how many questions the worker has answered since it was waited for the next one.
    """

    series: int
    next: int = 0
    answers: int = 0
    held: dict[int, _Entry | None] = field(default_factory=dict)

    def calls(self) -> list[_Entry]:
        """Returns the calls that are held, in their order."""
        return [entry for _, entry in sorted(self.held.items()) if entry is not None]


class Mailbox:
    """The waiting and the running calls of one actor. Any thread may call its methods.

    What a method returns must be done by its caller, by `do`, in this order and without a lock.

    Args:
        title: the name of the actor's class, and its own if it has one.
        concurrency: how many calls run at once.
        beside: how many calls of single methods run at once beside those; 0 means no limit.
        max_bytes: how many bytes may wait; 0 means no limit. A single call may be larger.
        full: returns the error of a call for which there is no room.
        busy: gets this mailbox as calls come; `sweep` takes it out when none are left.

    Attributes:
        title, concurrency: the same.
        beside: the lanes of single methods, by name.
        stopped: the error of all calls after `stop`; None before.
    """

    def __init__(
        self,
        title: str,
        concurrency: int,
        beside: Mapping[str, int],
        max_bytes: int,
        full: Callable[[], BaseException],
        busy: set[Mailbox],
    ) -> None:
        self.title = title
        self.concurrency = concurrency
        self.beside = {name: _Lane(limit) for name, limit in beside.items()}
        self.stopped: BaseException | None = None
        self._max_bytes = max_bytes
        self._full = full
        self._busy = busy  # of all actors: a set's methods are atomic
        # Guards what follows. No other lock is taken while it is held. The threads that take it
        # hold back signal handlers, or run none.
        self._lock = threading.Lock()
        self._main = _Lane(concurrency, ordered=concurrency > 1)
        self._free = _Lane(0)
        self._orders: dict[int, _Order] = {}
        self._running: dict[CancelScope, tuple[_Lane, Message]] = {}
        self._bytes = 0  # of the entries that wait or are held, abandoned ones included

    @staticmethod
    def do(steps: Sequence[Call]) -> None:
        """Begins or refuses the calls that another method has returned."""
        for call in steps:
            try:
                call[1]()
            except Exception as error:
                give_up(call, error)

    # -- events ----------------------------------------------------------------------------

    def arrive(
        self, call: Call, sender: int = 0, turn: Turn | None = None, method: str = ""
    ) -> Sequence[Call]:
        """Takes a call that has come.

        Args:
            call: the call.
            sender: the worker that made it.
            turn: its place in the order of that worker's calls; None if the sender does not know
                that this is an actor.
            method: its name, if there are methods beside the others.
        """
        steps: list[Call] = []
        with self._lock:
            self._busy.add(self)
            lane = self._main
            if self.beside:
                lane = self.beside.get(method, lane)
            if turn == BESIDE:
                lane = self._free
            elif turn is not None:
                order = self._orders.get(sender)
                if order is not None and turn == (order.series, order.next) and not order.held:
                    order.next += 1  # the usual case
                elif lane is self._main:
                    self._pass(sender, turn, self._entry(call, steps), steps)
                    return steps
                else:
                    self._pass(sender, turn, None, steps)
            busy = 0 < lane.limit <= lane.running or lane.starting is not None
            if busy or lane.waiting or self.stopped is not None:
                if (entry := self._entry(call, steps)) is not None:
                    lane.waiting.append(entry)
            else:
                lane.running += 1
                self._running[call[0].scope] = lane, call[0]
                if lane.ordered:
                    lane.starting = call[0].scope
                steps.append(call)
        return steps

    def on_begun(self, scope: CancelScope) -> Sequence[Call]:
        """Notes that the function of a call is about to be called; if several run at once."""
        steps: list[Call] = []
        with self._lock:
            if self._main.starting is scope:
                self._main.starting = None
                self._go_on(self._main, steps)
        return steps

    def end(self, scope: CancelScope) -> Sequence[Call]:
        """Notes that a call has ended, or never runs. May be called again."""
        steps: list[Call] = []
        with self._lock:
            lane, _ = self._running.pop(scope, (None, None))
            if lane is not None:
                lane.running -= 1
                if lane.starting is scope:
                    lane.starting = None
                if lane.waiting:
                    self._go_on(lane, steps)
        return steps

    def skip(self, sender: int, turn: Turn) -> Sequence[Call]:
        """Notes that the message of a number never comes."""
        steps: list[Call] = []
        with self._lock:
            self._busy.add(self)
            self._pass(sender, turn, None, steps)
        return steps

    def on_answered(self, sender: int) -> Sequence[Call]:
        """Notes that all has come, or is lost, that a worker had sent before it was asked."""
        steps: list[Call] = []
        with self._lock:
            order = self._orders.get(sender)
            if order is not None and order.held:
                order.answers += 1
                if order.answers >= LOST_AFTER_ANSWERS:
                    order.next = min(order.held)
                    self._release(order, steps)
        return steps

    def forget(self, sender: int) -> Sequence[Call]:
        """Notes that a worker is lost: those of its calls that are not abandoned need not wait."""
        steps: list[Call] = []
        with self._lock:
            order = self._orders.pop(sender, None)
            if order is not None:
                self._release_all(order, steps)
        return steps

    def refuse(self, scope: CancelScope, error: BaseException) -> Sequence[Call]:
        """Refuses a call that waits for its turn, if it still does; an end comes nevertheless."""
        steps: list[Call] = []
        with self._lock:
            for lane in self._lanes():
                for entry in [each for each in lane.waiting if each[0][0].scope is scope]:
                    if self.stopped is None:
                        lane.waiting.remove(entry)
                        self._bytes -= entry[1]
                    steps.append(_refusal(entry[0], error))
        return steps

    def sweep(self) -> Sequence[Call]:
        """Ends abandoned calls that will not report their end.

        They were let begin and never will, or have returned a future that may never be done.
        """
        with self._lock:
            useless = [
                scope
                for scope in self._running
                # A generator reports its end once it is closed.
                if scope.cancelled and not (scope.in_steps if scope.deferred else scope.begun)
            ]
            waits = any(lane.waiting for lane in self._lanes())
            if not (self._running or waits or any(each.held for each in self._orders.values())):
                self._busy.discard(self)
        # One of them may be about to find out that it must not begin, and ends then once more.
        return [step for scope in useless for step in self.end(scope)]

    def stop(self, error: BaseException, last: Call | None = None) -> Sequence[Call]:
        """Refuses all calls that wait, and those that come; ``last`` begins when none runs.

        It does not wait for calls beside the others. If this is called again, ``last`` begins after
        the one before.
        """
        steps: list[Call] = []
        with self._lock:
            if self.stopped is None:
                self.stopped = error
                steps += [_refusal(call, error) for call, _ in self._entries()]
                for lane in self._lanes():
                    lane.waiting.clear()
                self._orders.clear()
                self._bytes = 0
                self._main.limit = 1
            if last is not None:
                self._busy.add(self)
                self._main.waiting.append((last, 0))
            self._go_on(self._main, steps)
        return steps

    def become(self, other: Mailbox) -> Sequence[Call]:
        """Takes the title and the limit of another mailbox, which has no calls."""
        steps: list[Call] = []
        with self._lock:
            self.title, self.concurrency, self._full = other.title, other.concurrency, other._full
            self._main.ordered = other._main.ordered
            if self.stopped is None:
                self._main.limit = other.concurrency
            self._go_on(self._main, steps)
        return steps

    # -- what there is ---------------------------------------------------------------------

    def missing(self) -> Collection[int]:
        """Returns the workers one of whose messages must come before others of them begin."""
        with self._lock:
            return [sender for sender, order in self._orders.items() if order.held]

    def look(self) -> list[tuple[list[Message], list[Message]]]:
        """Returns the requests that run in each lane, and those that wait there, in their order.

        Last what is held, beside nothing that runs.
        """
        with self._lock:
            found = [
                ([each for its, each in self._running.values() if its is lane], list(lane.waiting))
                for lane in self._lanes()
            ]
            found.append(([], self._held()))
        return [
            (running, [entry[0][0] for entry in waiting if not _is_abandoned(entry)])
            for running, waiting in found
        ]

    # -- the lock is held ------------------------------------------------------------------

    def _pass(self, sender: int, turn: Turn, entry: _Entry | None, steps: list[Call]) -> None:
        """Counts a number as passed, with the call that has come with it, if it may wait."""
        series, number = turn
        order = self._orders.get(sender)
        if order is None or series > order.series:
            if order is not None:
                self._release_all(order, steps)
            order = self._orders[sender] = _Order(series)
        if series == order.series and number >= order.next:
            order.held[number] = entry
            self._release(order, steps)
        elif entry is not None:  # it comes late: it was taken for lost
            self._main.waiting.append(entry)
            self._go_on(self._main, steps)

    def _release(self, order: _Order, steps: list[Call]) -> None:
        """Queues the calls whose turn has come."""
        while order.next in order.held:
            entry = order.held.pop(order.next)
            order.next += 1
            order.answers = 0
            if entry is not None:
                self._main.waiting.append(entry)
        self._go_on(self._main, steps)

    def _release_all(self, order: _Order, steps: list[Call]) -> None:
        """Queues all calls of an order that is over."""
        self._main.waiting.extend(order.calls())
        self._go_on(self._main, steps)

    def _go_on(self, lane: _Lane, steps: list[Call]) -> None:
        """Begins the calls of a lane for which it is time."""
        # No function in between: if there were no memory for it, nobody would look again.
        while lane.waiting and lane.starting is None and not 0 < lane.limit <= lane.running:
            call, size = lane.waiting.popleft()
            request = call[0]
            self._bytes -= size
            if not request.scope.cancelled:
                lane.running += 1
                self._running[request.scope] = lane, request
                if lane.ordered:
                    lane.starting = request.scope
                steps.append(call)

    def _entry(self, call: Call, steps: list[Call]) -> _Entry | None:
        """Returns the entry of a call that waits; if it must not, has it refused."""
        size = call[0].nbytes + _ENTRY_BYTES
        error = self.stopped
        if error is None and self._max_bytes and self._bytes:
            if self._bytes + size > self._max_bytes:
                self._drop_abandoned()
            if self._bytes and self._bytes + size > self._max_bytes:
                error = self._full()
        if error is not None:
            steps.append(_refusal(call, error))
            return None
        self._bytes += size
        return call, size

    def _drop_abandoned(self) -> None:
        for lane in self._lanes():
            lane.waiting = deque(entry for entry in lane.waiting if not _is_abandoned(entry))
        for order in self._orders.values():
            for number, entry in order.held.items():
                if entry is not None and _is_abandoned(entry):
                    order.held[number] = None
        self._bytes = sum(size for _, size in self._entries())

    def _lanes(self) -> list[_Lane]:
        return [self._main, self._free, *self.beside.values()]

    def _entries(self) -> list[_Entry]:
        """Returns what waits in the lanes, and then what is held."""
        return [entry for lane in self._lanes() for entry in lane.waiting] + self._held()

    def _held(self) -> list[_Entry]:
        """Returns the calls that came too early, those of each caller in their order."""
        return [entry for order in self._orders.values() for entry in order.calls()]


def give_up(call: Call, error: BaseException) -> None:
    """Refuses a call that could not begin, for lack of memory, say; those behind it go on."""
    request, _, refuse = call
    refuse(error)
    request.scope.cancelled = True  # then its place is given back, in the next `Mailbox.sweep`


def _refusal(call: Call, error: BaseException) -> Call:
    """Returns what refuses a call instead of beginning it."""
    return call[0], partial(call[2], error), call[2]


def _is_abandoned(entry: _Entry) -> bool:
    return bool(entry[0][0].scope.cancelled)
