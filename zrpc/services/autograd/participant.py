"""The part of a worker that was asked to take part in a backward pass."""

from __future__ import annotations

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.errors import BackwardError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd import ddp
from zrpc.services.autograd.dependencies import Origin
from zrpc.services.autograd.nodes import Gradients, without_gaps
from zrpc.services.autograd.part import Part, RunningPart
from zrpc.services.autograd.state import ContextState
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["Participant"]


class Participant(RunningPart):
    """Takes part in a pass for the worker that has begun it.

    The gradients that it computes last for that worker travel with its answer. So they are held
    back until the part ends, or until that takes long: what is left of the part could wait for
    other workers, by a hook or a function of the user's that zrpc does not know of, and these could
    need the gradients.
    """

    def __init__(
        self, agent: Agent, state: ContextState, pass_id: int, initiator: MemberId
    ) -> None:
        super().__init__(agent, state, pass_id)
        self._initiator = initiator
        # Guards what follows, and is held while they are sent: the answer comes after that.
        self._lock = UninterruptedLock()
        self._held: tuple[Origin, Gradients] | None = None
        self._ticks = 0

    def answer(self, request: Message, part: Part, send_id: int, gradients: Gradients) -> None:
        """Runs the part and answers the request, which may have come with gradients.

        Raises:
            Exception: the pass has failed.
        """
        self.mailbox.check()
        if send_id:
            self.mailbox.deliver((self._initiator, send_id), gradients)
        try:
            self.run(part, (), [self._initiator])
        finally:
            self.mailbox.check()  # in place of what a hook has exited with
        with self._lock:
            (_, send_id), last = self._held or ((self._initiator, 0), ())
            self._held = None
        self._agent.callee.answer(request, without_gaps(last), self._extension(send_id))

    @override
    def _send(self, origin: Origin, gradients: Gradients) -> None:
        is_last = not self._awaited and not self._uncomputed
        if is_last and origin[0] == self._initiator and not ddp.in_use():
            with self._lock:
                self._held = origin, gradients
        else:
            self._post(origin, gradients)

    def tick(self) -> None:
        """Sends held-back gradients if what is left of the part takes long; in the I/O thread."""
        if self._held is not None:
            self._ticks += 1
            if self._ticks > 1:  # a whole one
                self._agent.pool.submit(self._send_held)

    def _send_held(self) -> None:
        with self._lock:
            if self._held is not None:
                self._post(*self._held)
                self._held = None

    @override
    def fail(self, error: Exception) -> None:
        if not isinstance(error, BackwardError):
            error = BackwardError(
                f"Error on Node {self._agent.worker_info.id}: {type(error).__name__}: {error}"
            )
        super().fail(error)
