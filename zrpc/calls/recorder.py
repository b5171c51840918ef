"""Records what happens on a worker and when, while a trace is on.

The parts of an agent have a `Recorder` while a trace is on, and None otherwise: that is all that a
call costs then. Nothing is added to messages: both ends of a call know its caller and its number,
so their records are matched when the trace is put together. Times are those of ``time.monotonic``;
``begun`` is the first one of each record.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from time import monotonic
from typing import Any, NamedTuple

from zrpc.calls.function_names import name_of_function
from zrpc.runtime.event_loop import running_loop
from zrpc.wire.kind import ANSWERS, REQUESTS, UNCOUNTED, Kind, Tag
from zrpc.wire.member_id import NOBODY, MemberId
from zrpc.wire.message import Message

# Messages that are neither a call's nor a matter of zrpc's own, such as those of a shutdown.
_SHOWN = frozenset(Kind) - REQUESTS - ANSWERS - UNCOUNTED
# The parent of a call that no handler has made.
NO_PARENT = (NOBODY, 0)


class CallRecord(NamedTuple):
    """A call, at the caller."""

    what: str  # the function's name, or ""
    kind: int  # of its request
    peer: int
    call_id: int
    parent: tuple[int, int]  # caller and number of the call whose handler has made it
    thread: int  # the ident of the thread that has made it
    waits: bool  # whether that thread has waited for the answer at once
    begun: float  # when it began to be packed
    packed: float
    sending: float  # what lies between `packed` and this is the wait for room; 0 if never sent
    left: float
    settled: float  # when it got its outcome
    done: float  # when the thread that has waited had its value; otherwise `settled`
    failed: bool
    sent_bytes: int
    sent_shared: bool  # whether the large buffers of the request went by shared memory
    answer_bytes: int
    answer_shared: bool


class HandlerRecord(NamedTuple):
    """A request, at the callee."""

    what: str  # the function's name, or ""
    kind: int
    caller: int
    call_id: int
    thread: int  # the ident of the thread that has begun it
    here: bool  # whether that thread has ended it too: not so for a coroutine or a future
    begun: float  # when it arrived
    started: float
    finished: float  # it was answered after that
    failed: bool
    about: str  # which backward pass the request is about, as of a `MessageRecord`


class MessageRecord(NamedTuple):
    """A message of the reference count, or of autograd, that is not a call's."""

    kind: int
    peer: int
    out: bool  # whether it was sent
    thread: int  # the ident of the thread that has sent or received it
    begun: float
    size: int  # in bytes
    # Which autograd context or backward pass it is about, and after " #" which of the messages
    # between these two workers; empty if it is about none.
    about: str


class SpanRecord(NamedTuple):
    """A piece of the program, or of zrpc, with a name."""

    name: str
    thread: int  # its ident
    task: int  # the identity of the asyncio task that it ran in; 0 for none
    begun: float
    ended: float


Record = CallRecord | HandlerRecord | MessageRecord | SpanRecord


class Recording:
    """The latest records for one trace. Any thread may add; one at a time may take.

    Args:
        capacity: how many records are kept until they are taken; the oldest are dropped.
    """

    def __init__(self, capacity: int) -> None:
        self._since = monotonic()
        # The type and the fields of each. To make a named tuple takes much longer.
        self._records: deque[tuple[Any, tuple[Any, ...]]] = deque(maxlen=capacity)
        # An increment is atomic, see `zrpc.calls.call_counters`.
        self._added = self._taken = 0

    def add(self, kind: type[Record], fields: tuple[Any, ...]) -> None:
        """Adds a record: its type, and its fields."""
        self._records.append((kind, fields))
        self._added += 1

    def take(self) -> list[Record]:
        """Removes and returns the records; leaves out what had begun before this trace."""
        taken = []
        for _ in range(len(self._records)):
            kind, fields = self._records.popleft()
            taken.append(kind(*fields))
        self._taken += len(taken)
        return [each for each in taken if each.begun >= self._since]

    @property
    def dropped(self) -> int:
        """How many records were dropped so far."""
        return max(0, self._added - self._taken - len(self._records))


class Recorder:
    """Records what happens on one worker, for all traces that are on.

    Any thread may call its methods.

    Args:
        recordings: one for each trace.
        describe: returns what a `Tag.PASS` extension says, for `MessageRecord.about`.
    """

    def __init__(self, recordings: Collection[Recording], describe: Callable[[bytes], str]) -> None:
        self._recordings = tuple(recordings)
        self._describe = describe

    def add(self, kind: type[Record], fields: tuple[Any, ...]) -> None:
        """Adds a record: its type, and its fields."""
        for recording in self._recordings:
            recording.add(kind, fields)

    def on_handled(self, request: Message, started: float, finished: float, failed: bool) -> None:
        """A request has run."""
        scope = request.scope
        function, thread = scope.function, threading.get_ident()
        self.add(
            HandlerRecord,
            (
                "" if function is None else name_of_function(function),
                request.kind,
                request.sender,
                request.call_id,
                scope.thread,
                not (scope.deferred or scope.in_task) and thread == scope.thread,
                scope.arrived,
                started,
                finished,
                failed,
                self._about(request),
            ),
        )

    def on_message(self, message: Message, peer: MemberId, out: bool) -> None:
        """A message has come, or is about to go: recorded if no other record tells of it."""
        if message.kind not in _SHOWN:
            return
        thread, at = threading.get_ident(), monotonic()
        size, about = message.nbytes, self._about(message)
        self.add(MessageRecord, (message.kind, peer, out, thread, at, size, about))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the time of a ``with`` statement, under a name."""
        task = id(asyncio.current_task()) if running_loop() else 0
        begun = monotonic()
        try:
            yield
        finally:
            self.add(SpanRecord, (name, threading.get_ident(), task, begun, monotonic()))

    def _about(self, message: Message) -> str:
        for tag, data in message.extensions:
            if tag == Tag.PASS:
                return self._describe(data)
        return ""
