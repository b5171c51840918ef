"""The requests of others that this worker has not answered yet.

No I/O in here. Each has a `CancelScope`, by which it is dropped where nobody waits for its answer
any more: where the caller has cancelled it or is gone, or its deadline has passed. One that has not
begun never will then, and its message is freed; of one that runs, the scope ends what it can. One
whose function has returned a future that is not done is no longer under way then.
"""

from __future__ import annotations

import threading
from time import monotonic

from zrpc.cancel_scope import NEVER, CancelScope
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind
from zrpc.worker_info import WorkerInfo

__all__ = ["Requests"]

# What is not dropped: the value of a REMOTE may be waited for by others than its creator, and
# a backward pass ends by rules of its own.
_DROPPABLE = frozenset((Kind.CALL, Kind.METHOD, Kind.FETCH))

# Cancellations of requests that are not here: most have been answered meanwhile, but one may have
# overtaken its request, which is larger. So many are remembered.
_EARLY_REMEMBERED = 4096

_Key = tuple[int, int]


class Requests:
    """The table of them. All methods may be called from any thread."""

    def __init__(self) -> None:
        # Single operations on the dicts are atomic.
        self._requests: dict[_Key, Message] = {}
        self._early: dict[_Key, None] = {}
        # No request in the table has an earlier deadline; the lock guards its changes.
        self._earliest = NEVER
        self._lock = threading.Lock()
        # Whether jobs may be queued that are not to run.
        self._dropped = False

    def __len__(self) -> int:
        return len(self._requests)

    def all(self) -> list[Message]:
        """Those that are there now."""
        return list(self._requests.values())

    def has(self, sender: int, call_id: int) -> bool:
        """Whether a request is here, and not answered."""
        return (sender, call_id) in self._requests

    def accept(self, request: Message, caller: WorkerInfo) -> CancelScope:
        """Enters a request; returns its scope, which is cancelled where that has come before."""
        key = (request.sender, request.call_id)
        scope = CancelScope(caller, request.deadline, request.kind not in _DROPPABLE)
        request.scope = scope
        self._requests[key] = request
        if scope.deadline < self._earliest:
            with self._lock:
                self._earliest = min(self._earliest, scope.deadline)
        if key in self._early:
            self._early.pop(key, None)
            self._drop(key, request)
        return scope

    def end(self, request: Message) -> None:
        """A request is answered, or never will be."""
        key = (request.sender, request.call_id)
        if self._requests.get(key) is request:  # not another one that came by the same number
            self._requests.pop(key, None)

    def set_aside(self, request: Message) -> None:
        """The function of a request has returned; its outcome comes later, or never."""
        # First the note, then the look: `_drop` does this the other way round, so that at least
        # one of the two sees the other.
        scope: CancelScope = request.scope
        scope.returned = True
        if scope.cancelled or scope.deadline <= monotonic():
            self.end(request)

    def cancel(self, sender: int, call_id: int) -> None:
        """The caller does not wait any more."""
        key = (sender, call_id)
        request = self._requests.get(key)
        if request is not None:
            self._drop(key, request)
            return
        self._early[key] = None
        if len(self._early) > _EARLY_REMEMBERED:
            self._early.pop(next(iter(self._early)), None)

    def lose(self, sender: int) -> None:
        """A caller is gone."""
        for key, request in list(self._requests.items()):
            if key[0] == sender:
                self._drop(key, request)
        for key in [key for key in list(self._early) if key[0] == sender]:
            self._early.pop(key, None)

    def expire(self, now: float) -> bool:
        """Drops what has its deadline behind it.

        Returns:
            Whether requests were dropped, since the last call, whose jobs may still be queued.
        """
        if now >= self._earliest:
            # Before the look at the table: an entry made meanwhile lowers it again.
            with self._lock:
                self._earliest = NEVER
            rest = NEVER
            for key, request in list(self._requests.items()):
                scope: CancelScope = request.scope
                if scope.deadline > now:
                    rest = min(rest, scope.deadline)
                else:
                    self._drop(key, request)
            with self._lock:
                self._earliest = min(self._earliest, rest)
        dropped, self._dropped = self._dropped, False
        return dropped

    def close(self) -> None:
        """Tells all handlers that nobody waits: this worker leaves."""
        for key, request in list(self._requests.items()):
            self._drop(key, request)

    def _drop(self, key: _Key, request: Message) -> None:
        scope: CancelScope = request.scope
        if not scope.cancel():
            # Its future may stay open for ever: no shutdown waits for that. Whoever waits for the
            # value of a REMOTE does so with a request of his own.
            if scope.returned:
                self.end(request)
            return
        self._requests.pop(key, None)
        self._dropped = True
        # The job that is queued for it refers to it. Nothing of it was unpickled.
        request.body = request.table = b""
        request.buffers = ()
        request.attachments = None
