"""How a worker leaves a mesh that goes on without it: when it has nothing left to do itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable

from zrpc.silence import Silence

__all__ = ["LeavingAlone"]

# Nothing may have come in for so long, in seconds: what others send together comes together.
_SILENCE = 0.01
# So long, in seconds, it waits also for what begins after its wish to leave: others may call it on
# and on. Then only what was under way at first is waited for.
_PATIENCE = 1.0


class LeavingAlone:
    """One worker's wait until it may leave, in place of `zrpc.graceful_shutdown`'s.

    It waits for its own calls, for the handlers that run here, and for the answers of the
    reference count; not for what the others do among themselves.

    Args:
        under_way: what this worker does just now, its calls and its handlers.

    For one thread at a time, that which receives; but `wait` and `leave_all_the_same` may be
    called from any, and the properties read by any.

    Attributes:
        done: whether the whole mesh has nothing left to do, which nobody finds out here.
        waits_for_all: whether this worker waits for all others to leave as well: it never does.
        missing: who has not begun to leave: nobody has to.
    """

    done = False
    waits_for_all = False
    missing: tuple[int, ...] = ()

    def __init__(self, under_way: Callable[[], set[Hashable]]) -> None:
        self._under_way = under_way
        self._first: set[Hashable] = set()
        self._patient_until = float("inf")
        self._begun = False
        self._silence = Silence()
        self._settled = threading.Event()
        self._may_leave = threading.Event()

    @property
    def settled(self) -> bool:
        """Whether this worker has nothing left to do, or to say."""
        return self._settled.is_set()

    @property
    def under_way(self) -> bool:
        """Whether this worker is leaving."""
        return self._begun

    @property
    def asked(self) -> bool:
        """Whether this worker is to tell when it is idle."""
        return self._begun and not self.settled

    def wait(self, timeout: float) -> bool:
        """Waits until this worker may leave; False where that took longer.

        Args:
            timeout: in seconds; 0 means none.
        """
        return self._may_leave.wait(timeout or None)

    def leave_all_the_same(self) -> None:
        """Ends the wait: this worker leaves."""
        self._may_leave.set()

    def begin(self) -> None:
        """This worker is to leave."""
        self._begun = True
        self._first = self._under_way()
        self._patient_until = time.monotonic() + _PATIENCE

    def look(self) -> None:
        """To be called often while it is `under_way`."""
        if self.asked and time.monotonic() >= self._patient_until:
            self._first &= self._under_way()
            if not self._first:
                self._settle()

    def receive(self, sender: int, body: bytes | bytearray | memoryview) -> None:
        """A termination message came in; there are none in such a mesh."""

    def idle(self, sent: int, received: int) -> None:
        """This worker has nothing to do; to be called while `asked`.

        Args:
            sent: messages that it ever sent to the workers that live.
            received: messages that it ever received from them.
        """
        if self._silence.lasted(received) >= _SILENCE:
            self._settle()

    def admit(self, rank: int) -> None:
        """A worker has come to the mesh."""

    def lose(self, rank: int) -> None:
        """A worker is gone."""

    def _settle(self) -> None:
        self._settled.set()
        self._may_leave.set()
