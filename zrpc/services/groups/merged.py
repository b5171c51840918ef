"""The streams of a group's members, read as one: what a `Stream` of a group takes its items from.

Each member has a stream of its own, with its own credit, and its own place. Whenever something has
arrived for one, the thread that receives appends it to a list. The thread, or the task, that wants
an item takes the first stream of the list, one item of it, and appends the stream again. So the
members take turns, and none is looked at that has nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.future_error import without_frames
from zrpc.constants import Seconds
from zrpc.errors import GroupError
from zrpc.runtime.interrupts import raise_if_of_handler, uninterrupted
from zrpc.services.groups.call import GroupCall
from zrpc.services.groups.shared_call import Sharer
from zrpc.services.streams.consumer import Consumer
from zrpc.services.streams.source import Source
from zrpc.services.streams.stream import Stream


class Merged(Source):
    """The items of several streams, each with its place. Any thread may call its methods.

    Args:
        agent: this worker's.
        title: what it is called in messages to people.
        names: what is at each place, for messages to people.
        what: what all of them are called.
        timeout: the longest wait for an item of one of them, in seconds; 0 means no limit.

    Attributes:
        sharer: gives out the items of `zrpc.share`; None if each place has its stream already.
    """

    def __init__(
        self, agent: Agent, title: str, names: Sequence[str], what: str, timeout: float
    ) -> None:
        super().__init__(agent, timeout)
        self._title = title
        self._names = names
        self._what = what
        self.sharer: StreamSharer | None = None
        # For which something may have arrived, maybe twice; see `Source.wake`.
        self._ready: deque[Consumer] = deque()
        # Guarded by the lock; the sharer's may be held while that is taken.
        self._streams: dict[Consumer, Stream[Any]] = {}
        self._left = len(names)  # places that have not come to their ends
        self._errors: dict[int, Exception] = {}
        self._closed = False

    # -- the streams -------------------------------------------------------------------------

    def add(self, place: int, stream: Stream[Any]) -> None:
        """Reads a stream from now on."""
        consumer: Any = stream.source
        with self._lock:
            closed = self._closed
            self.is_local |= consumer.is_local
            if not closed:
                self._streams[consumer] = stream
        if closed:
            stream.close()
        else:
            consumer.follow(self, place)

    def end(
        self,
        place: int,
        error: Exception | None,
        consumer: Consumer | None = None,
        last: Sequence[Any] = (),
    ) -> None:
        """Notes that a place has no stream, or that its stream has come to its end.

        Args:
            place: the place.
            error: what has ended it; None if it has just come to its end.
            consumer: its stream.
            last: what the reader gets beside the items of the stream.
        """
        with self._lock:
            if self._closed or (consumer is not None and self._streams.pop(consumer, None) is None):
                return
        again = False
        if self.sharer is not None and consumer is not None:
            again = self.sharer.note_end(place, error)
        with self._lock:
            if not again:
                self._left -= 1
                self.items.extend(last)
                if error is not None:
                    self._errors[place] = without_frames(error)
        if not self._left:
            self.wake()
        if self.sharer is None:
            return
        if again or self._left:
            self.sharer.go_on()
        else:
            self.sharer.finish()

    @property
    @override
    def title(self) -> str:
        """What it is called in messages to people."""
        return self._title

    @override
    def opened(self) -> list[Consumer]:
        return list(self._streams)

    def notify(self, consumer: Consumer) -> None:
        """Learns that something has arrived. In any thread, also the one that receives.

        If a member is done with its item, another thread gives it the next one.
        """
        taken_at_once = self.is_awaited and consumer.returned
        self._list(consumer)
        if self.sharer is not None and consumer.inflow.complete and not taken_at_once:
            self._agent.caller.complete(self.sharer.go_on)

    def _list(self, consumer: Consumer) -> None:
        self._ready.append(consumer)
        self.wake()

    # -- the reader --------------------------------------------------------------------------

    @override
    def close(self) -> None:
        """Ends all streams at once."""
        with self._lock:
            self._closed = self._left > 0
            streams, self._streams = self._streams, {}
        if self.sharer is not None:
            self.sharer.finish()
        self.items.clear()
        for stream in streams.values():
            stream.close()
        self.wake()

    @override
    def is_ready(self) -> bool:
        """Returns whether something has arrived, or nothing more can."""
        return bool(self._ready) or not self._left or self._closed

    @override
    def has_items(self) -> bool:
        """Takes the next item, if there is one; returns whether there is.

        Raises:
            StopIteration: there are none left.
            GroupError: some of the streams have failed; all have come to their ends.
        """
        try:
            while self._ready:
                try:
                    consumer = self._ready.popleft()
                except IndexError:  # another thread has taken it
                    break
                if consumer in self._streams and self._take_of(consumer):
                    return True
        except BaseException:  # of a signal handler: one may be missing from the list
            for consumer in self.opened():
                self._list(consumer)
            raise
        if self._left and not self._closed:
            return False
        errors = {} if self._closed else dict(sorted(self._errors.items()))
        if not errors:
            raise StopIteration
        ended = dict.fromkeys(each for each in range(len(self._names)) if each not in errors)
        raise GroupError.of(errors, ended, self._names, self._what)

    def _take_of(self, consumer: Consumer) -> bool:
        """Takes an item of a stream, if it has one; notes its end, if it has come to it."""
        error, last = None, []
        try:
            if not consumer.has_items():
                return False
            with uninterrupted:
                self._list(consumer)
                with contextlib.suppress(IndexError):  # another thread has taken it
                    self.items.append((consumer.place, consumer.items.popleft()))
            return bool(self.items)
        except StopIteration as end:
            last = [end.value] if consumer.returned else []
        except Exception as failure:
            raise_if_of_handler(failure)
            error = failure
        self.end(consumer.place, error, consumer, last)
        return bool(self.items)


class StreamSharer(Sharer):
    """Gives out items by streams. A member is at most one item ahead of the reader.

    Args:
        merged: reads the streams.
        call: see `Sharer`.
    """

    def __init__(self, merged: Merged, call: GroupCall) -> None:
        super().__init__(call)
        self._merged = merged
        self._given: dict[Consumer, int] = {}  # the streams that have not ended, and their members

    @override
    def _has_room(self) -> bool:
        return len(self._merged.opened()) < 2 * len(self._targets)

    @override
    def _give(self, item: int, place: int, body: Any, seconds: Seconds) -> None:
        stream = self._targets[place].ask(body, seconds, plain=True)
        self._given[stream.source] = place
        self._merged.add(item, stream)

    @override
    def _fail(self, item: int, error: Exception) -> None:
        self._merged.end(item, error)

    @override
    def go_on(self) -> None:
        """Gives items to all members that are free, also to those that are now."""
        for consumer in [each for each in list(self._given) if each.inflow.complete]:
            place = self._given.pop(consumer, None)
            if place is not None:
                self._take_back(place, consumer.inflow.outcome[0])
        super().go_on()
