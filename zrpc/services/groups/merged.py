"""The streams of a group's members, read as one: what a `Stream` of a group takes its items from.

Each member has a stream of its own, with its own credit, and its own place. Whenever something has
arrived for a place, the thread that receives appends the place to a list. The thread, or the task,
that wants an item takes the first place of the list, one item of its stream, and appends the place
again. So the members take turns, and none is looked at that has nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.future_error import without_frames
from zrpc.calls.pending_call import PendingCall
from zrpc.errors import GroupError
from zrpc.runtime.interrupts import UninterruptedLock, raise_if_of_handler, uninterrupted
from zrpc.runtime.thread_pool import current_pool, pass_gate
from zrpc.services.groups.packing import Bodies
from zrpc.services.groups.shared_call import Sharer
from zrpc.services.groups.target import Deadline, Joining, Target
from zrpc.services.streams.consumer import Consumer
from zrpc.services.streams.source import Source, present_reader
from zrpc.services.streams.stream import Stream


class Merged(Source):
    """The items of several streams. Any thread may call its methods.

    Args:
        agent: this worker's.
        name: what the program called.
        names: what is at each place, for messages to people.
        what: what all of them are called.
        timeout: the longest wait for an item of one of them, in seconds; 0 means no limit.

    Attributes:
        items: those that can be taken at once: each with its place.
        used_at: when the program last asked for more, on the clock of ``time.monotonic``.
        read_by: by whom; see `present_reader`.
        sharer: gives out the items of `zrpc.share`; None if each place has its stream already.
    """

    def __init__(
        self, agent: Agent, name: str, names: Sequence[str], what: str, timeout: float
    ) -> None:
        self._agent = agent
        self._name = name
        self._names = names
        self._what = what
        self._timeout = timeout
        self.items: deque[Any] = deque()
        self.used_at = monotonic()
        self.read_by = present_reader()
        self.sharer: StreamSharer | None = None
        # Places for which something may have arrived, maybe twice; and what wakes those who wait.
        # A place is appended before wakers are taken, and a waker before the places are looked at.
        self._ready: deque[int] = deque()
        self._wakers: deque[Callable[[], object]] = deque()
        # Guards what follows. The sharer's lock may be held; no other is taken while it is held.
        self._lock = UninterruptedLock()
        self._streams: dict[int, tuple[Stream[Any], Consumer]] = {}
        self._left = len(names)  # places that have not come to their ends
        self._errors: dict[int, Exception] = {}
        self._closed = False
        # For how long the reader has waited when a place last gave an item; see `_waited`.
        self._asked: dict[int, float] = {}
        self._waits: set[Callable[[], object]] = set()  # the wakers of those who wait
        self._waited_before = self._waits_since = 0.0

    # -- the streams -------------------------------------------------------------------------

    def add(self, place: int, stream: Stream[Any]) -> None:
        """Reads a stream from now on."""
        consumer: Any = stream.source
        with self._lock:
            closed = self._closed
            if not closed:
                self._streams[place] = stream, consumer
                self._asked[place] = self._waited()
        if closed:
            stream.close()
        else:
            consumer.follow(self, partial(self._notify, place, consumer))

    def fail(self, place: int, error: Exception) -> None:
        """Notes that a place has no stream."""
        if self._end(place, None, error):
            self._after_end()

    def forget(self, place: int) -> None:
        """Leaves a stream: there will be another one at its place."""
        with self._lock:
            self._streams.pop(place, None)

    def opened(self) -> list[tuple[int, Consumer]]:
        """Returns the streams that are not read to their ends, by place."""
        return [(place, consumer) for place, (_, consumer) in list(self._streams.items())]

    @property
    def calls(self) -> list[PendingCall]:
        """The calls of these streams."""
        return [consumer.call for _, consumer in self.opened()]

    def _notify(self, place: int, consumer: Consumer) -> None:
        """Notes that something has arrived for a place. In any thread, also the one that receives.

        If a member is done with its item, another thread gives it the next one.
        """
        taken_at_once = self.is_awaited and consumer.returned
        self._list(place)
        if self.sharer is not None and consumer.complete and not taken_at_once:
            self._agent.caller.complete(self.sharer.go_on)

    def _list(self, place: int) -> None:
        self._ready.append(place)
        self._ring()

    def _ring(self) -> None:
        while self._wakers:
            try:
                self._wakers.popleft()()
            except IndexError:  # another thread has taken it
                return

    def _end(self, place: int, consumer: Consumer | None, error: Exception | None) -> bool:
        """Notes that a place has come to its end; returns False if it has before."""
        with self._lock:
            _, known = self._streams.get(place, (None, None))
            if self._closed or known is not consumer:
                return False
            self._streams.pop(place, None)
            self._asked.pop(place, None)
            self._left -= 1
            if error is not None:
                self._errors[place] = without_frames(error)
        return True

    def _after_end(self) -> None:
        """Gives out the next item, or wakes all that wait for one."""
        if not self._left:
            self._ring()
        if self.sharer is not None:
            self.sharer.go_on() if self._left else self.sharer.finish()

    # -- the reader --------------------------------------------------------------------------

    @property
    @override
    def name(self) -> str:
        """What the program called."""
        return self._name

    @property
    @override
    def where(self) -> str:
        """How many members run it."""
        return f"{len(self._names)} {self._what}"

    @property
    @override
    def is_awaited(self) -> bool:
        """Whether a thread or a task waits for an item."""
        return bool(self._waits)

    @override
    def close(self) -> None:
        """Ends all streams at once."""
        with self._lock:
            self._closed = self._left > 0
            streams, self._streams = self._streams, {}
        if self.sharer is not None:
            self.sharer.stop()
            self.sharer.finish()
        self.items.clear()
        for stream, _ in streams.values():
            stream.close()
        self._ring()

    @override
    def _wait(self, gate: threading.Lock, seconds: float | None) -> None:
        # What `zrpc stacks` shows is read from this frame.
        own, receive = self._agent.membership.own_id, None
        if current_pool() is None and all(call.peer != own for call in self.calls):
            receive = self._agent.receiver.receive
        pass_gate(gate, -1 if seconds is None else seconds, receive)

    @override
    def has_items(self) -> bool:
        """Takes the next item, if there is one; returns whether there is.

        Raises:
            StopIteration: there are none left.
            GroupError: some of the streams have failed; all have come to their ends.
        """
        self.used_at, self.read_by = monotonic(), present_reader()
        try:
            while self._ready:
                try:
                    place = self._ready.popleft()
                except IndexError:  # another thread has taken it
                    break
                _, consumer = self._streams.get(place, (None, None))
                if consumer is not None and self._take_of(place, consumer):
                    return True
        except BaseException:  # of a signal handler: a place may be missing from the list
            for place, _ in self.opened():
                self._list(place)
            raise
        if self._left and not self._closed:
            return False
        errors = {} if self._closed else dict(sorted(self._errors.items()))
        if not errors:
            raise StopIteration
        ended = dict.fromkeys(each for each in range(len(self._names)) if each not in errors)
        raise GroupError.of(errors, ended, self._names, self._what)

    def _take_of(self, place: int, consumer: Consumer) -> bool:
        """Takes an item of a place, if it has one; notes its end, if it has come to it."""
        value, error = None, None
        try:
            if not consumer.has_items():
                return False
            with uninterrupted:
                self._list(place)
                self._asked[place] = self._waited()
                with contextlib.suppress(IndexError):  # another thread has taken it
                    self.items.append((place, consumer.items.popleft()))
            return bool(self.items)
        except StopIteration as end:
            value = end.value
        except Exception as failure:
            raise_if_of_handler(failure)
            error = failure
        if self.sharer is not None and self.sharer.end(place, consumer):
            return False  # another member gets it
        with uninterrupted:
            ended = self._end(place, consumer, error)
            if ended and error is None and consumer.returned:
                self.items.append(value)
        if ended:
            self._after_end()
        return bool(self.items)

    @override
    def _will_wake(self, waker: Callable[[], object]) -> bool:
        with uninterrupted:
            self._wakers.append(waker)
            self._note_wait(self._waits.add, waker)
        return not self._ready and self._left > 0 and not self._closed

    @override
    def _forget_waker(self, waker: Callable[[], object]) -> None:
        with uninterrupted:
            self._note_wait(self._waits.discard, waker)
            with contextlib.suppress(ValueError):  # it was called
                self._wakers.remove(waker)

    # -- the time that the reader waits ------------------------------------------------------

    def _note_wait(
        self, change: Callable[[Callable[[], object]], None], waker: Callable[[], object]
    ) -> None:
        """Notes that a reader begins to wait, or no longer waits."""
        now = monotonic() - self._agent.caller.calls.postponed
        with self._lock:
            if self._waits:
                self._waited_before += now - self._waits_since
            self._waits_since = now
            change(waker)

    def _waited(self) -> float:
        """Returns for how long readers have waited, in seconds."""
        if not self._waits:
            return self._waited_before
        now = monotonic() - self._agent.caller.calls.postponed
        return self._waited_before + now - self._waits_since

    @override
    def _countdown(self) -> Callable[[], float | None]:
        return self._expire

    def _expire(self) -> float | None:
        """Ends the streams that have let the reader wait too long; returns when the next is due."""
        if not self._timeout:
            return None
        now, first = self._waited(), self._timeout
        for place, consumer in self.opened():
            left = self._asked.get(place, now) + self._timeout - now
            if left <= 0:
                consumer.close(consumer.timed_out())
            else:
                first = min(first, left)
        return first


class StreamSharer(Sharer):
    """Gives out items by streams. A member is at most one item ahead of the reader.

    Args:
        merged: reads the streams.
        *args: see `Sharer`.
    """

    def __init__(self, merged: Merged, *args: Any) -> None:
        super().__init__(*args)
        self._merged = merged
        self._busy: dict[int, Consumer] = {}  # the streams that have not ended, by item
        # Held while the end of a stream is noted; all others are taken while it is held.
        self._ending = UninterruptedLock()

    @override
    def _has_room(self) -> bool:
        return len(self._merged.opened()) < 2 * len(self._targets)

    @override
    def _give(self, item: int, target: Target, body: Any, seconds: float) -> None:
        stream = target.ask(body, seconds, plain=True)
        self._busy[item] = stream.source
        self._merged.add(item, stream)

    @override
    def _fail(self, item: int, error: Exception) -> None:
        self._merged.fail(item, error)

    @override
    def go_on(self) -> None:
        """Gives items to all members that are free, also to those that are now."""
        for item, consumer in list(self._busy.items()):
            self.end(item, consumer)
        super().go_on()

    def end(self, item: int, consumer: Consumer) -> bool:
        """Lets a member go if its stream has ended; returns whether another one gets its item."""
        with self._ending:
            if not consumer.complete or self._busy.get(item) is not consumer:
                return False
            del self._busy[item]
            again = self._end(item, consumer.outcome)
            if again:
                self._merged.forget(item)
        return again


def merge(
    agent: Agent,
    targets: Sequence[tuple[int, Target]],
    bodies: Bodies,
    timeout: float,
    deadline: Deadline,
    joining: Joining | None,
) -> Merged:
    """Calls a generator of each member, and returns what reads all of them."""
    share, what = bodies.shared, "members of the group"
    names = [target.name for _, target in sorted(targets)]
    if share is not None:
        names, what = [f"item {number}" for number in range(len(share.items))], "items"
    merged = Merged(agent, bodies.name, names, what, timeout)
    try:
        if share is not None:
            merged.sharer = StreamSharer(merged, agent, targets, bodies, share.items, deadline)
            merged.sharer.begin(joining)
            return merged
        for place, target in targets:
            try:
                merged.add(place, target.ask(bodies.body(place), deadline.left()))
            except Exception as error:  # of this member only: the others are called
                merged.fail(place, error)
    except BaseException:  # Ctrl-C: nobody gets the stream
        merged.close()
        raise
    return merged
