"""Graceful shutdown: how a worker waits until it may leave its mesh.

In a mesh of a fixed size all workers leave together, when none of them has anything left to do:
`Shutdown`, the I/O around `zrpc.agent.termination`. In an elastic mesh a worker leaves by itself,
when it has nothing left to do: `SoloShutdown`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import IntEnum

from typing_extensions import override

from zrpc.agent.termination import Outgoing, Termination, TerminationMessage
from zrpc.membership.view import Membership
from zrpc.runtime.thread_pool import pass_gate
from zrpc.wire.member_id import MemberId, rank_of


@dataclass(frozen=True, slots=True)
class ShutdownTiming:
    """How long the steps of a shutdown take, all in seconds.

    Attributes:
        look: how often the I/O thread looks whether this worker is idle. A handler that ends in the
            pool says nothing there.
        remind: how often a worker repeats what may have been lost.
        monitor: after this time the leader monitors also the workers that it hears nothing of.
        quiet: a worker that leaves by itself must have received nothing for this time: what others
            send together comes together.
        new_work: for this time such a worker also waits for work that began after its wish to
            leave. After that only work that was in progress before counts; otherwise callers could
            keep the worker alive without limit.
        chains: once all workers have begun, for how long chains of callbacks may go on in any case.
        services: how long to wait for what services wait for, if no message comes in.
        handlers: how long to wait for handlers that still run, if the shutdown is not graceful.
        join: how long to wait for the worker's own threads.
        end: how long a second shutdown waits for the first one to end.
        linger: how long queued messages have to leave.
        linger_not_graceful: how long they have if the shutdown is not graceful.
    """

    look: float = 0.005
    remind: float = 1.0
    monitor: float = 1.0
    quiet: float = 0.01
    new_work: float = 1.0
    chains: float = 5.0
    services: float = 10.0
    handlers: float = 1.0
    join: float = 5.0
    end: float = 10.0
    linger: float = 2.0
    linger_not_graceful: float = 0.1


class Phase(IntEnum):
    """How far a worker's shutdown has come."""

    RUNNING = 0
    BEGUN_ELSEWHERE = 1  # at workers that leave together with this one
    BEGUN = 2
    SETTLED = 3  # this worker has nothing left to do, or to say


@dataclass(eq=False)
class Shutdown:
    """One worker's wait until it may leave: here, when the whole mesh has nothing left to do.

    Only the I/O thread calls its methods, except that any thread may call `wait` and
    `leave_anyway`, and read the properties.

    Args:
        post: sends a termination message to a member.
        timing: how long its steps take.

    Attributes:
        phase: how far it has come; it never goes back.
        done: whether the whole mesh has nothing left to do.
    """

    timing = ShutdownTiming()

    _membership: Membership
    _post: Callable[[MemberId, TerminationMessage], None]

    def __post_init__(self) -> None:
        self.phase = Phase.RUNNING
        self.done = False
        self._termination = Termination(self._membership.own_id, self._membership.living)
        self._next_reminder = self._monitor_at = 0.0
        # Open once this worker may leave. Not an event: its lock might be held by a thread that a
        # signal handler interrupts, and the I/O thread would wait for that.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._openers = [self._gate.release]  # taken by the thread that opens the gate

    @property
    def waits_long_for_all(self) -> bool:
        """Whether this worker leads, and has waited for the others; each of them must answer."""
        return self._termination.waits_for_all and time.monotonic() > self._monitor_at

    @property
    def asked(self) -> bool:
        """Whether `idle` must be called as soon as this worker is idle."""
        return self._termination.asked

    @property
    def all_begun(self) -> bool:
        """Whether all workers have begun to shut down; false if each leaves by itself."""
        return self._termination.all_begun

    @property
    def ends_waits(self) -> bool:
        """Whether what waits here for other workers, without a call of its own, waits in vain.

        All of them have begun to shut down; or this one leaves by itself.
        """
        return self.all_begun

    def obstacles(self) -> str:
        """Returns what other workers are waited for, as far as is known here: "; ..." or ""."""
        missing = [rank_of(member) for member in self._termination.missing]
        unfinished = [rank_of(member) for member in self._termination.unfinished]
        text = f"; ranks {missing} have not begun to shut down" if missing else ""
        return text + (f"; calls are still in progress on ranks {unfinished}" if unfinished else "")

    def wait(self, timeout: float) -> bool:
        """Waits until this worker may leave; False if that took longer.

        Args:
            timeout: in seconds; 0 means none.
        """
        return pass_gate(self._gate, timeout or -1)

    def leave_anyway(self) -> None:
        """Ends the wait: this worker leaves."""
        with contextlib.suppress(IndexError):  # the gate is open
            self._openers.pop()()

    def begin(self) -> None:
        """Begins the shutdown of this worker."""
        self._advance(Phase.BEGUN)
        now = time.monotonic()
        self._next_reminder, self._monitor_at = now + self.timing.remind, now + self.timing.monitor
        self._send(self._termination.begin())

    def look(self) -> None:
        """Does what is due; must be called often while a shutdown is in progress."""
        now = time.monotonic()
        if now >= self._next_reminder:
            self._next_reminder = now + self.timing.remind
            self._send(self._termination.remind())

    def idle(self, sent: int, received: int) -> None:
        """Notes that this worker has nothing to do; must be called while `asked`.

        Args:
            sent: counted messages that it ever sent to the members that live.
            received: counted messages that it ever received from them.
        """
        self._send(self._termination.idle(sent, received))

    def receive(self, sender: MemberId, body: bytes | bytearray | memoryview) -> None:
        """Handles a termination message.

        Raises:
            ProtocolError: it is none.
        """
        self._advance(Phase.BEGUN_ELSEWHERE)
        self._send(self._termination.receive(sender, TerminationMessage.parse(body)))

    def admit(self, member: MemberId) -> None:
        """Notes that a member has joined."""
        self._termination.admit(member)

    def on_member_lost(self, member: MemberId) -> None:
        """Notes that a member is lost."""
        self._send(self._termination.on_member_lost(member))

    def _send(self, outgoing: Outgoing) -> None:
        if self._termination.done:
            self.done = True  # before the messages that let other workers leave
        for member, message in outgoing:
            self._post(member, message)
        self._advance(Phase.SETTLED if self.done else self.phase)

    def _advance(self, phase: Phase) -> None:
        self.phase = max(self.phase, phase)
        if self.phase >= Phase.SETTLED:
            self.leave_anyway()


@dataclass(eq=False)
class SoloShutdown(Shutdown):
    """A `Shutdown` of one worker, whose mesh goes on without it.

    It waits for the worker's own calls, for the handlers that run here, and for the answers of the
    reference count; not for what the other workers do among themselves. So it sends no termination
    messages, and never finds out whether the whole mesh is done.

    Args:
        work: returns what this worker is doing: its calls and its handlers.
    """

    _work: Callable[[], set[Hashable]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first: set[Hashable] = set()
        self._new_work_until = float("inf")
        self._quiescence = Quiescence()

    @property
    @override
    def asked(self) -> bool:
        return self.phase is Phase.BEGUN

    @property
    @override
    def ends_waits(self) -> bool:
        return self.phase >= Phase.BEGUN

    @override
    def begin(self) -> None:
        self._advance(Phase.BEGUN)
        self._first = self._work()
        self._new_work_until = time.monotonic() + self.timing.new_work

    @override
    def look(self) -> None:
        # All that is left may have begun too late to count.
        if self.asked and time.monotonic() >= self._new_work_until:
            self._first &= self._work()
            if not self._first:
                self._advance(Phase.SETTLED)

    @override
    def idle(self, sent: int, received: int) -> None:
        if self._quiescence.lasted(received) >= self.timing.quiet:
            self._advance(Phase.SETTLED)


class Quiescence:
    """For how long nothing has come in. For one thread at a time.

    Example:
        >>> Quiescence().lasted(received=3)
        0.0
    """

    def __init__(self) -> None:
        self._received = -1
        self._since = 0.0

    def lasted(self, received: int) -> float:
        """Returns the seconds since the first call with this number of messages received."""
        now = time.monotonic()
        if received != self._received:
            self._received, self._since = received, now
        return now - self._since
