"""Flow control: how many bytes of calls may be in flight to each peer.

No I/O in here. A call counts as much as its message and, for its other parts, 2 KiB, so that the
number of small calls is bounded as well. A call that does not fit waits until answers have made
room. So neither the caller's queue nor the callee's grows without limit if the callee is slower.

Calls from a handler are counted apart for as long as they come from the same thread (or asyncio
task): what a handler calls must never wait for the calls that wait for this handler.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from zrpc.errors import RpcTimeoutError
from zrpc.runtime.interrupts import uninterrupted
from zrpc.runtime.thread_pool import pass_gate
from zrpc.wire.member_id import MemberId

if TYPE_CHECKING:
    from zrpc.calls.pending_calls import PendingCall

__all__ = ["DELAYED", "LATER", "NOW", "SETTLED", "Admission", "FlowControl", "Window", "no_room"]

# To which peer, and from which kind of caller.
_Key = tuple[MemberId, Hashable]

# What the parts of a call other than its message occupy, in bytes, at the caller and at the callee;
# measured: 1.8 and 1.5 kB. So it bounds the number of small calls.
OVERHEAD_BYTES = 2048


class Admission(Enum):
    """Whether a call may be sent."""

    NOW = "there was room"
    DELAYED = "there is room, after a wait"
    LATER = "it waits for room, and is sent by another thread"
    SETTLED = "it has an outcome, and must not be sent"


# Looked up once, since each call needs them: an enum takes longer for that than a module.
NOW, DELAYED, LATER, SETTLED = Admission


class Window(NamedTuple):
    """The calls to one peer from callers of one kind.

    Attributes:
        of_handler: whether the callers are one handler.
        used: the bytes in flight.
        waiting: how many calls wait for room.
    """

    of_handler: bool
    used: int
    waiting: int


class FlowControl:
    """The bytes in flight, by peer and kind of caller. Any thread may call its methods.

    Args:
        limit: the most bytes in flight to one peer; a single call may be larger. 0: no limit.

    Attributes:
        limit: the same.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Guards what follows. In the main thread, callers hold back signal handlers.
        self._lock = threading.Lock()
        self._used: dict[_Key, int] = {}
        self._waiting: dict[_Key, deque[_Waiter]] = {}
        # By call: whose room it takes and how much, or what waits there for room.
        self._taken: dict[int, tuple[_Key, int | _Waiter]] = {}
        # The ident of the thread that waits for room for each call. Not guarded.
        self._threads: dict[int, int] = {}

    def enter(self, call: PendingCall, caller: Hashable, size: int) -> Admission:
        """Waits until there is room for a call, at most until its deadline.

        Args:
            call: the call, not sent yet. If there is no room in time, it is settled with
                `RpcTimeoutError`.
            caller: whose calls it is counted with.
            size: of its message, in bytes.

        Returns:
            NOW, DELAYED or SETTLED.
        """
        if self._has_room(call, (call.peer, caller), size + OVERHEAD_BYTES):
            return SETTLED if call.settled else NOW
        gate = threading.Lock()
        gate.acquire()
        if self.enter_later(call, caller, size, gate.release) is not LATER:
            return _unless_settled(call, NOW)
        self._threads[call.call_id] = threading.get_ident()
        try:
            if call.settled:
                return SETTLED
            while not pass_gate(gate, call.remaining()):
                if call.remaining():
                    continue  # its deadline was postponed meanwhile
                call.fail(no_room(call, self.limit))
                # If another thread has taken the call from the table, it settles the call at once.
                pass_gate(call.gate)
                break
        except BaseException:
            call.fail(no_room(call, self.limit))  # Ctrl-C: the call is never sent
            raise
        finally:
            del self._threads[call.call_id]
        return _unless_settled(call, DELAYED)

    def waiting_threads(self) -> dict[int, int]:
        """Returns the idents of the threads that wait for room, by the id of their call."""
        return self._threads.copy()

    def enter_now(self, call: PendingCall, caller: Hashable, size: int) -> bool:
        """Gives room to a call, as `enter` does; False if there is none now."""
        return self._has_room(call, (call.peer, caller), size + OVERHEAD_BYTES)

    def enter_later(
        self, call: PendingCall, caller: Hashable, size: int, go: Callable[[], None]
    ) -> Admission:
        """Gives room to a call, or queues it; for callers that must not wait.

        Args:
            call: as in `enter`.
            caller: as in `enter`.
            size: as in `enter`.
            go: called once if there is no room now, by the thread that makes room or settles the
                call. It must be quick, and settle no call.

        Returns:
            NOW, LATER or SETTLED.
        """
        size += OVERHEAD_BYTES
        key = (call.peer, caller)
        if self._has_room(call, key, size, _Waiter(call, size, go)):
            return _unless_settled(call, NOW)
        if call.settled:
            self.leave(call)
        return LATER

    def _has_room(
        self, call: PendingCall, key: _Key, size: int, waiter: _Waiter | None = None
    ) -> bool:
        """Gives room to a call, or has its waiter queued."""
        if not self.limit:
            return True
        with self._lock:
            used = self._used.get(key, 0)
            if not used or (used + size <= self.limit and key not in self._waiting):
                self._let_in(call, key, size, used)
                return True
            if waiter is not None:
                self._waiting.setdefault(key, deque()).append(waiter)
                # First the note, then the look, as in _let_in: the thread that settles the call
                # lets the waiter go.
                self._taken[call.call_id] = (key, waiter)
        return False

    def leave(self, call: PendingCall) -> None:
        """Frees the room of a call that is settled, or ends its wait for room."""
        # Looked at without the lock: see _let_in for a call that is let in just now.
        if call.call_id not in self._taken:
            return
        with self._lock:
            found = self._taken.pop(call.call_id, None)
            if found is None:
                return
            key, taken = found
            if isinstance(taken, _Waiter):
                # In its queue as long as it is noted: both change under the lock.
                self._waiting[key].remove(taken)
                if not self._waiting[key]:
                    del self._waiting[key]
                taken.go()
            else:
                self._free(key, taken)

    def no_room(self, call: PendingCall) -> RpcTimeoutError | None:
        """Makes the error of a call whose deadline passes while it waits for room; else None."""
        found = self._taken.get(call.call_id)  # atomic, so it needs no lock
        waits = found is not None and isinstance(found[1], _Waiter)
        return no_room(call, self.limit) if waits else None

    def __len__(self) -> int:
        """How many bytes are in flight."""
        with uninterrupted, self._lock:
            return sum(self._used.values())

    def windows(self) -> dict[MemberId, list[Window]]:
        """Returns the windows with calls in flight, by peer: one for each kind of caller."""
        found: dict[MemberId, list[Window]] = {}
        with uninterrupted, self._lock:
            for (peer, caller), used in self._used.items():
                waiting = len(self._waiting.get((peer, caller), ()))
                found.setdefault(peer, []).append(Window(caller is not None, used, waiting))
        return found

    def _free(self, key: _Key, size: int) -> None:
        """Frees bytes, and lets in the calls that fit now; the lock is held."""
        used = self._used[key] = self._used[key] - size
        waiting = self._waiting.get(key)
        if waiting is not None:
            while waiting and (not used or used + waiting[0].size <= self.limit):
                waiter = waiting.popleft()
                used = self._let_in(waiter.call, key, waiter.size, used)
                waiter.go()
            if not waiting:
                del self._waiting[key]
        if not used:
            self._used.pop(key, None)

    def _let_in(self, call: PendingCall, key: _Key, size: int, used: int) -> int:
        """Gives room to a call unless it is settled; returns the bytes in use. The lock is held."""
        # First the room, then the look: the thread that settles it does this the other way round.
        # Both entries without a call in between, at which a signal's handler might raise.
        self._taken[call.call_id] = (key, size)
        self._used[key] = used + size
        if not call.settled:
            return used + size
        del self._taken[call.call_id]
        if used:
            self._used[key] = used
        else:
            del self._used[key]
        return used


class _Waiter(NamedTuple):
    """A call that waits for room; ``go()`` reports that it has some, or no longer needs any."""

    call: PendingCall
    size: int
    go: Callable[[], None]


def _unless_settled(call: PendingCall, admission: Admission) -> Admission:
    return SETTLED if call.settled else admission


def no_room(call: PendingCall, limit: int) -> RpcTimeoutError:
    """Makes the error of a call that was not sent in time."""
    return RpcTimeoutError(
        f"the call was not sent within its timeout ({call.timeout * 1000:.0f} ms): calls of "
        f"{limit} bytes (max_bytes_in_flight) are in flight to that worker, which is slower "
        f"than its callers{call.explanation()}"
    )
