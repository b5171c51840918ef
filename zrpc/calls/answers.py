"""Answers: what receives them, and what becomes of those that bring no value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from zrpc.calls.pending_calls import PendingCalls
from zrpc.calls.taking import Taking
from zrpc.errors import ProtocolError
from zrpc.runtime.resource_limits import advice
from zrpc.wire.message import Message


class Receiver(Protocol):
    """What receives the answers; see `zrpc.agent.receiver`."""

    def receive(self, gate: threading.Lock, timeout: float) -> None:
        """Receives until a gate opens, in the thread that waits for it, if that is possible."""

    def hurry(self) -> None:
        """Lets the I/O thread receive at once, for a thread that waits and does not receive."""

    def complete(self, job: Callable[[], None]) -> None:
        """Completes a future that no thread waits for, by a job."""

    def in_next_turn(self, errand: Callable[[], object]) -> None:
        """Runs a job in the I/O thread soon. Takes no locks."""


@dataclass(frozen=True, slots=True)
class UnreadAnswers:
    """What becomes of the calls whose answers can't be read. For the I/O thread."""

    _calls: PendingCalls

    def on_unreadable(self, answer: Message, error: Exception) -> None:
        """Fails the call of an answer that can't be read."""
        call = self._calls.get(answer.call_id)
        if call is None:
            return
        hint = advice(error)
        why = f"{error}; {hint}" if hint else error
        outcome = ProtocolError(f"the answer can't be read: {why}")
        outcome.executed = True
        call.fail(outcome)

    def on_lost(self, answer: Message, error: Exception) -> None:
        """Fails the call of an answer if only its header has come."""
        self._calls.settle(answer.call_id, error)

    def on_unread(self, answer: Message, _data: bytes) -> None:
        """Undoes what was done for the message of a call: the callee has read nothing of it."""
        call = self._calls.get(answer.call_id)
        if call is not None:
            call.take_back()


def settle_with_receipt(
    calls: PendingCalls, answer: Message, receipt: Callable[[bool], None]
) -> None:
    """Tells the owner of a value whether it is taken, also if Ctrl-C comes before that."""
    call = calls.get(answer.call_id)
    # Of the thread that waits in `Caller.call`, or of the future: tasks may await that later.
    taking = None if call is None else Taking.of(call).join()
    if calls.settle(answer.call_id, answer) is None or taking is None:
        receipt(False)
    else:
        taking.ask(receipt)
