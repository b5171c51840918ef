"""Flow control: how many bytes of calls may be under way to each peer.

No I/O in here. A call takes as much as its message and, for its other parts, 2 KiB, so that small
calls are bounded as well. One that does not fit waits until answers have made room, so that neither
the caller's queue nor the callee's grows without end where the callee is slower.

Calls from a handler have a window of their own for as long as they come from the same thread (or
asyncio task): what a handler calls must never wait for the calls that wait for this handler.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

from zrpc.calls import PendingCall
from zrpc.errors import RpcTimeoutError
from zrpc.pool import acquire

__all__ = ["Window"]

# What the parts of a call other than its message occupy, in bytes, at the caller and at the callee;
# measured: 1.8 and 1.5 kB. So it bounds the number of small calls.
OVERHEAD = 2048


class Window:
    """The bytes under way, by peer and kind of caller. All methods may be called by any thread.

    Args:
        limit: the most bytes under way to one peer; a single call may be larger. 0: no limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Guards what follows, and `room` of the calls.
        self._lock = threading.Lock()
        self._used: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, deque[_Waiter]] = {}

    def enter(self, call: PendingCall, caller: Hashable, size: int) -> bool:
        """Waits until there is room for a call, at most until its deadline.

        Args:
            call: the call, not sent yet; it is settled with RpcTimeoutError where there is no
                room in time.
            caller: whose window it is.
            size: of its message, in bytes.

        Returns:
            False where the call is settled already, and is not to be sent.
        """
        if self.enter_now(call, caller, size):
            return not call.settled
        gate = threading.Lock()
        gate.acquire()
        if self.enter_later(call, caller, size, gate.release):
            return not call.settled
        try:
            if call.settled:
                return False
            if not acquire(gate, call.remaining()):
                call.give_up(no_room(call, self._limit))
        except BaseException:
            call.give_up(no_room(call, self._limit))  # Ctrl-C: the call is never sent
            raise
        return not call.settled

    def enter_now(self, call: PendingCall, caller: Hashable, size: int) -> bool:
        """As `enter`, where there is room; False where there is none now."""
        return self._has_room(call, (call.peer, caller), size + OVERHEAD)

    def enter_later(
        self, call: PendingCall, caller: Hashable, size: int, go: Callable[[], None]
    ) -> bool:
        """As `enter`, for callers that must not wait.

        Args:
            call: as there.
            caller: as there.
            size: as there.
            go: called once, where there is no room now, by whoever makes it, or settles the call;
                it must be short, and take no call out.

        Returns:
            Whether there is room now; it is not used where the call is settled already.
        """
        key = (call.peer, caller)
        size += OVERHEAD
        waiter = _Waiter(call, size, go)
        if self._has_room(call, key, size, waiter):
            return True
        if call.settled:
            self.leave(call)
        return False

    def _has_room(
        self, call: PendingCall, key: Hashable, size: int, waiter: _Waiter | None = None
    ) -> bool:
        """Gives room to a call, or has it wait for that."""
        if not self._limit:
            return True
        with self._lock:
            used = self._used.get(key, 0)
            if not used or (used + size <= self._limit and key not in self._waiting):
                taken = self._let_in(call, key, size)
                if taken:
                    self._used[key] = used + taken
                return True
            if waiter is not None:
                self._waiting.setdefault(key, deque()).append(waiter)
                # First the note, then the look, as in _let_in: whoever settles it lets it go on.
                call.room = (key, waiter)
                call.delayed = True
        return False

    def leave(self, call: PendingCall) -> None:
        """A call is settled: there is room for others, or it need not wait for room."""
        with self._lock:
            if call.room is None:
                return
            key, taken = call.room
            call.room = None
            if isinstance(taken, _Waiter):
                self._remove(key, taken)
                taken.go()
            else:
                self._free(key, taken)

    def __len__(self) -> int:
        """How many bytes are under way."""
        with self._lock:
            return sum(self._used.values())

    def _free(self, key: Hashable, size: int) -> None:
        """Takes bytes out, and lets in those that fit now; the lock is held."""
        used = self._used[key] - size
        waiting = self._waiting.get(key, ())
        while waiting and (not used or used + waiting[0].size <= self._limit):
            waiter = waiting.popleft()
            used += self._let_in(waiter.call, key, waiter.size)
            waiter.go()
        if not waiting:
            self._waiting.pop(key, None)
        if used:
            self._used[key] = used
        else:
            self._used.pop(key, None)

    @staticmethod
    def _let_in(call: PendingCall, key: Hashable, size: int) -> int:
        """Gives room to a call; returns how much, none where it is settled. Under the lock."""
        # First the room, then the look: whoever settles it does this the other way round.
        call.room = (key, size)
        if call.settled:
            call.room = None
            return 0
        return size

    def _remove(self, key: Hashable, waiter: _Waiter) -> None:
        """Takes a waiter out, where it is there; the lock is held."""
        waiting = self._waiting.get(key)
        if waiting is not None and waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._waiting[key]


class _Waiter:
    """A call that waits for room; ``go()`` tells that it has some, or needs none any more."""

    __slots__ = ("call", "go", "size")

    def __init__(self, call: PendingCall, size: int, go: Callable[[], None]) -> None:
        self.call = call
        self.size = size
        self.go = go


def no_room(call: PendingCall, limit: int) -> RpcTimeoutError:
    """The error of a call that was not sent in time."""
    return RpcTimeoutError(
        f"the call was not sent within its timeout ({call.timeout * 1000:.0f} ms): calls of "
        f"{limit} bytes (max_bytes_in_flight) are under way to that worker, which is slower "
        f"than its callers{call.explanation()}"
    )
