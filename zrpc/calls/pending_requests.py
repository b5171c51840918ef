"""The requests of other workers that this worker has not answered yet.

No I/O in here. Each request has a `CancelScope`: it is dropped when its caller no longer
waits: the caller cancelled it or is gone, or its deadline has passed. If its handler has not begun,
it never will, and the message is freed. If the handler runs, the scope cancels what it can. If the
handler has returned a future that is not done, the request no longer counts as in progress. That
of a generator does until it has been closed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import monotonic

from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.pending_call import NEVER
from zrpc.membership.worker_info import WorkerInfo
from zrpc.wire.kind import DROPPABLE, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# How many cancellations of unknown requests are remembered. Most of these requests were answered
# already, but a cancellation may also overtake its request, which is larger.
_MAX_EARLY_CANCELS = 4096

_Key = tuple[MemberId, int]


class PendingRequests:
    """The table of pending requests. Any thread may call its methods.

    Args:
        infos: the members that may call.
    """

    def __init__(self, infos: Mapping[MemberId, WorkerInfo]) -> None:
        self._infos = infos
        # Single operations on the dicts are atomic.
        self._requests: dict[_Key, Message] = {}
        self._early_cancels: dict[_Key, None] = {}
        # No request in the table has an earlier deadline; the lock guards its changes.
        self._earliest = NEVER
        self._lock = threading.Lock()
        # Whether jobs of dropped requests may still be queued.
        self._dropped = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._requests)

    def all(self) -> list[Message]:
        """Returns the requests in the table."""
        # Atomic. To list the items is not: it makes a tuple of each, and whenever anything is made,
        # the garbage collector of Python 3.11 may run a finalizer, which lets other threads run.
        return list(self._requests.values())

    def get(self, sender: MemberId, call_id: int) -> Message | None:
        """Returns a request that is here and not answered; else None."""
        return self._requests.get((sender, call_id))

    def accept(self, request: Message) -> CancelScope:
        """Enters a request that must be answered: until then this worker is not idle.

        Returns:
            Its scope, cancelled already if the cancellation came first, or this worker leaves.
        """
        key = (request.sender, request.call_id)
        scope = CancelScope(
            self._infos[request.sender], request.deadline, request.kind not in DROPPABLE
        )
        scope.call_id = request.call_id
        if request.attachments:
            scope.hops = request.attachments.get(Tag.HOPS, 0)
        request.scope = scope
        self._requests[key] = request
        if scope.deadline < self._earliest:
            with self._lock:
                self._earliest = min(self._earliest, scope.deadline)
        # Entered first, read afterwards; `close` does the reverse. So at least one of the two drops
        # it.
        if key in self._early_cancels or self._closed:
            self._early_cancels.pop(key, None)
            self._drop(request)
        return scope

    def end(self, request: Message) -> None:
        """Removes a request that is answered, or never will be."""
        key = (request.sender, request.call_id)
        if self._requests.get(key) is request:  # not another one with the same id
            self._requests.pop(key, None)
        scope: CancelScope | None = request.scope
        if scope is not None and not scope.cancelled:
            scope.deadline = NEVER  # for tasks that the handler has left behind

    def defer(self, request: Message) -> None:
        """Notes that a request's function has returned; its outcome comes later, or never."""
        # Sets `deferred` first and reads `cancelled` afterwards; `_drop` does the reverse. So at
        # least one of the two sees the other.
        scope: CancelScope = request.scope
        scope.deferred = True
        if scope.cancelled or scope.deadline <= monotonic():
            self._end_deferred(request)

    def resume(self, request: Message) -> None:
        """Notes that a function of a deferred request is about to run: it is waited for again."""
        # As in `defer`, before `cancelled` is read: by `CancelScope.begin`.
        request.scope.deferred = False

    def cancel(self, sender: MemberId, call_id: int) -> None:
        """Drops a request whose caller no longer waits."""
        key = (sender, call_id)
        request = self._requests.get(key)
        if request is not None:
            self._drop(request)
            return
        self._early_cancels[key] = None
        if len(self._early_cancels) > _MAX_EARLY_CANCELS:
            self._early_cancels.pop(next(iter(self._early_cancels)), None)

    def on_member_lost(self, member: MemberId) -> None:
        """Drops the requests of a caller that is gone."""
        for request in self.all():
            if request.sender == member:
                self._drop(request)
        for key in [key for key in list(self._early_cancels) if key[0] == member]:
            self._early_cancels.pop(key, None)

    def expire(self, now: float) -> bool:
        """Drops the requests whose deadline has passed.

        Returns:
            Whether jobs may be queued of requests that were dropped since the last call.
        """
        if now >= self._earliest:
            # Before the table is read: an entry made meanwhile lowers it again.
            with self._lock:
                self._earliest = NEVER
            earliest = NEVER
            for request in self.all():
                scope: CancelScope = request.scope
                if scope.deadline > now:
                    earliest = min(earliest, scope.deadline)
                else:
                    self._drop(request)
            with self._lock:
                self._earliest = min(self._earliest, earliest)
        dropped, self._dropped = self._dropped, False
        return dropped

    def postpone(self, seconds: float) -> None:
        """Gives all requests this much more time."""
        for request in self.all():
            request.scope.deadline += seconds

    def close(self) -> None:
        """Drops all requests, and from now on each that comes: this worker leaves."""
        self._closed = True
        for request in self.all():
            self._drop(request)

    def _end_deferred(self, request: Message) -> None:
        """Removes a request that nobody waits for, unless its handler still has steps to go."""
        # A future may never be done, so no shutdown waits for it. A worker that waits for the value
        # of a REMOTE does so by a request of its own. But a generator is closed, which may call.
        if not request.scope.in_steps:
            self.end(request)

    def _drop(self, request: Message) -> None:
        scope: CancelScope = request.scope
        if not scope.cancel():
            if scope.deferred:
                self._end_deferred(request)
            return
        self._requests.pop((request.sender, request.call_id), None)
        self._dropped = True
        # Frees the message, which the queued job refers to. Nothing of it was unpickled.
        request.body = request.table = b""
        request.buffers = ()
        request.attachments = None
