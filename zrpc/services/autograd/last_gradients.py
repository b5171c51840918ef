"""The gradients that a worker's part of a pass computes last: they travel with its answer."""

from __future__ import annotations

from collections.abc import Callable

from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd.nodes import Gradients
from zrpc.wire.member_id import MemberId

__all__ = ["LastGradients"]


class LastGradients:
    """Holds gradients back until the part that has computed them ends, or until that takes long.

    What is left of the part then could wait for other workers, by a hook or a function of the
    user's that zrpc does not know of, and these could need the gradients. Any thread may call its
    methods.

    Args:
        receiver: the worker that has asked for the part.
        send: sends it gradients, of the message with this id, without the answer.
    """

    def __init__(self, receiver: MemberId, send: Callable[[int, Gradients], None]) -> None:
        self.receiver = receiver
        self._send = send
        # Guards what follows, and is held while they are sent: the answer comes after that.
        self._lock = UninterruptedLock()
        self._held: tuple[int, Gradients] | None = None
        self._ticks = 0

    def hold(self, send_id: int, gradients: Gradients) -> None:
        """Takes the gradients."""
        with self._lock:
            self._held = send_id, gradients

    def tick(self) -> bool:
        """Returns whether they have been held for a whole tick of the I/O thread."""
        self._ticks += 1
        return self._ticks > 1

    def send(self) -> None:
        """Sends them now, unless they were taken; the errors are those of ``send``."""
        with self._lock:
            if self._held is not None:
                self._send(*self._held)
                self._held = None

    def take(self) -> tuple[int, Gradients] | None:
        """Returns them for the answer, with the id of their message; None if there are none."""
        with self._lock:
            held, self._held = self._held, None
            return held
