"""A worker's graceful shutdown: the I/O around `zrpc.termination`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zrpc.membership import Membership
from zrpc.termination import Outgoing, Termination, TerminationMessage

__all__ = ["GracefulShutdown"]

# How often a worker repeats what may have been lost, in seconds.
_REMIND_EVERY = 1.0


class GracefulShutdown:
    """One worker's wait until its whole mesh has nothing left to do.

    Args:
        membership: the worker's.
        post: sends a termination message to a rank.

    For one thread at a time, that which receives; but `wait` and `leave_all_the_same` may be
    called from any, and the events that they use are read from any.
    """

    def __init__(
        self, membership: Membership, post: Callable[[int, TerminationMessage], None]
    ) -> None:
        self._membership = membership
        self._post = post
        # None until this worker shuts down, or another has asked it about its own.
        self._termination: Termination | None = None
        self._next_reminder = 0.0
        # Set once the whole mesh has nothing left to do.
        self._done = threading.Event()
        # Set then, or when this worker leaves all the same.
        self._may_leave = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the whole mesh has nothing left to do."""
        return self._done.is_set()

    @property
    def settled(self) -> bool:
        """Whether this worker has nothing left to do, or to say."""
        return self._done.is_set()

    @property
    def under_way(self) -> bool:
        """Whether any worker shuts down."""
        return self._termination is not None

    @property
    def waits_for_all(self) -> bool:
        """Whether this worker has begun, and all others are to tell it that they have."""
        return self._termination is not None and self._termination.waits_for_all

    @property
    def asked(self) -> bool:
        """Whether the leader is to be told as soon as this worker is idle."""
        return self._termination is not None and self._termination.asked is not None

    @property
    def missing(self) -> list[int]:
        """Who has not begun to shut down, where this worker knows."""
        return self._termination.missing if self._termination is not None else []

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
        """This worker shuts down."""
        self._next_reminder = time.monotonic() + _REMIND_EVERY
        self._send(self._rules().begin())

    def look(self) -> None:
        """To be called often while it is `under_way`."""
        now = time.monotonic()
        if now >= self._next_reminder:
            self._next_reminder = now + _REMIND_EVERY
            self._send(self._rules().remind())

    def receive(self, sender: int, body: bytes | bytearray | memoryview) -> None:
        """A termination message came in.

        Raises:
            ProtocolError: it is none.
        """
        termination = self._rules()
        self._send(termination.receive(sender, TerminationMessage.parse(body)))

    def idle(self, sent: int, received: int) -> None:
        """This worker has nothing to do; to be called while `asked`.

        Args:
            sent: messages that it ever sent to the workers that live.
            received: messages that it ever received from them.
        """
        self._send(self._rules().idle(sent, received))

    def admit(self, rank: int) -> None:
        """A worker has come to the mesh."""
        if self._termination is not None:
            self._termination.admit(rank)

    def lose(self, rank: int) -> None:
        """A worker is gone."""
        if self._termination is not None:
            self._send(self._termination.lose(rank))

    def _rules(self) -> Termination:
        if self._termination is None:
            self._termination = Termination(self._membership.rank, self._membership.living)
        return self._termination

    def _send(self, outgoing: Outgoing) -> None:
        for rank, message in outgoing:
            self._post(rank, message)
        if self._termination is not None and self._termination.done:
            self._done.set()
            self._may_leave.set()
