"""The thread that receives: which one it is, and what it does with a turn.

One of two I/O threads receives, see `zrpc.runtime.leader_follower`. A thread that waits for an
answer receives in its place for a short time, see `Receiver.receive`. "The I/O thread" is, here and
in the services, the thread that receives just now, whichever that is. It reads headers, settles
calls and hands requests to the pool. It neither unpickles, nor runs what a user wrote, nor waits
for a peer, except for handlers that have been quick of late: these it runs itself, between two
messages.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from zrpc.agent.dispatcher import Dispatcher
from zrpc.calls.pending_call import NEVER, PendingCall
from zrpc.calls.pending_calls import PendingCalls
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.adaptive_spin import AdaptiveSpin
from zrpc.runtime.interrupts import hold_interrupts, release_interrupts
from zrpc.runtime.leader_follower import LONGEST_SITTING, LeaderFollower
from zrpc.runtime.thread_errors import printing_errors
from zrpc.runtime.thread_pool import HandlerPool
from zrpc.transport.network import Network

__all__ = ["Receiver"]

logger = logging.getLogger(__name__)

# How often the I/O thread looks after deadlines, peers and threads while nothing arrives.
_TICK_SECONDS = 0.1
# At most this many messages that are there already are dealt with in one turn.
_MESSAGES_PER_TURN = 64


class Receiver:
    """Receives one worker's messages, in one thread at a time. Any thread may call its methods.

    Args:
        context: of the I/O threads.
        network: where messages come from.
        pool: runs handlers.
        completions: completes futures.
    """

    def __init__(
        self,
        worker: WorkerInfo,
        context: contextvars.Context,
        network: Network,
        pool: HandlerPool,
        completions: HandlerPool,
    ) -> None:
        self._worker = worker
        self._network = network
        self._pool = pool
        self._completions = completions
        self._threads = LeaderFollower(context, f"zrpc-{worker.name}-io", self._lead, network.wake)
        # For the leader, from all messages; for a thread that receives in its place, from the
        # answers that it waits for.
        self._leader_spin = AdaptiveSpin()
        self._waiter_spin = AdaptiveSpin()
        self._next_tick = 0.0
        # Whether a handler must run after the present turn, in its thread.
        self._handler_taken = False
        # What other threads want done in the I/O thread.
        self._errands: deque[Callable[[], object]] = deque()
        # The gate for which a thread last received in the leader's place.
        self._awaited: threading.Lock | None = None

    def start(
        self,
        dispatcher: Dispatcher,
        calls: PendingCalls,
        after_turn: Callable[[float], None],
        tick: Callable[[], None],
    ) -> None:
        """Starts the I/O threads.

        Args:
            dispatcher: gives each message to its handler.
            calls: those that wait for answers.
            after_turn: called after each turn, with the time; it must be quick.
            tick: called about ten times a second.
        """
        self._dispatcher = dispatcher
        self._dispatch = dispatcher.dispatch
        self._calls = calls
        self._after_turn = after_turn
        self._tick = tick
        self._threads.start()

    def stop(self, timeout: float) -> bool:
        """Ends the I/O threads; False if a job still ran in one when the timeout passed."""
        return self._threads.stop(timeout)

    # -- for other threads -----------------------------------------------------------------

    def receive(
        self,
        gate: threading.Lock,
        timeout: float = -1,
        own_calls: Callable[[], int] = lambda: 0,
    ) -> None:
        """Receives until a gate opens, in the thread that waits for it, if that is possible.

        So no other thread need wake up. Not for long: then the I/O thread goes on.

        Args:
            gate: opened by what is to be received.
            timeout: seconds; negative means without limit.
            own_calls: the number of calls in flight whose answers this thread will soon wait for.
                The I/O thread may go on resting meanwhile.
        """
        self._awaited = gate
        if not self._threads.resting:
            return
        hold_interrupts()
        try:
            if not self._threads.sit():
                return
            begun = now = time.monotonic()
            end = begun + (LONGEST_SITTING if timeout < 0 else min(LONGEST_SITTING, timeout))
            awake = begun + self._waiter_spin.seconds
            try:
                while gate.locked() and now < end:
                    self._turn(end, awake - now)
                    now = time.monotonic()
                self._waiter_spin.waited(now - begun)
            finally:
                self._threads.leave()
            if len(self._calls) > own_calls():  # this one, or those of other threads
                self._threads.end_rest()
        finally:
            release_interrupts()

    def receives_now(self) -> bool:
        """Returns whether the current thread is in a turn, so nothing arrives while it waits."""
        return self._threads.seated()

    def run(self, job: Callable[[], None]) -> None:
        """Has a handler's job run: in the pool, or by the I/O thread after its present turn."""
        if self._threads.take(self._pool, job):
            self._handler_taken = True
        else:
            self._pool.submit(job)

    def complete(self, job: Callable[[], None]) -> None:
        """Has a future completed that no thread waits for."""
        if not self._threads.take(self._completions, job):
            self._completions.submit(job)

    def in_io_thread(self, errand: Callable[[], None]) -> None:
        """Has something done in the I/O thread soon. Not for finalizers: it takes locks."""
        self._errands.append(errand)
        self._network.wake()

    def in_next_turn(self, errand: Callable[[], object]) -> None:
        """Has something done in the I/O thread at its next tick at the latest; takes no locks."""
        self._errands.append(errand)

    # -- the I/O thread --------------------------------------------------------------------

    def on_answered(self, call: PendingCall) -> None:
        """Lets the leader rest if the caller will receive the next answer itself.

        That is likely if it received this one, soon, and no other call is in flight.
        """
        if (
            call.gate is self._awaited
            and not len(self._calls)
            and time.monotonic() - call.begun < LONGEST_SITTING
        ):
            self._threads.rest(self._next_tick)

    def hasten(self, next_tick: float) -> None:
        """Has the next tick come at this time, or before, on the clock of ``time.monotonic``."""
        self._next_tick = min(self._next_tick, next_tick)

    def _lead(self) -> None:
        """Does a turn of the leading I/O thread."""
        self._turn(NEVER, self._leader_spin.seconds)

    def _turn(self, until: float, spin: float) -> None:
        """Waits for a message until a time at most, and does what is due.

        In one thread at a time: the leading I/O thread, or a thread that receives in its place.
        """
        try:
            self._receive_next(until, spin)
            if self._errands:
                self._do_errands()
            now = time.monotonic()
            self._after_turn(now)
            # Before calls expire: a service may postpone their deadlines.
            if now >= self._next_tick:
                self._next_tick = now + _TICK_SECONDS  # first: also if an error ends the tick
                self._tick()
            if now >= self._calls.earliest:
                self._calls.expire(now)
        except Exception:
            with printing_errors():
                logger.exception("%s: the I/O thread goes on after an error", self._worker)

    def _receive_next(self, until: float, spin: float) -> None:
        """Waits for a message, and deals with it, and with others that have come with it.

        The others are left to the next turn if a quick handler must run after this one.
        """
        begun = time.monotonic()
        wait = min(self._next_tick, self._calls.earliest, until) - begun
        self._handler_taken = False
        count = 0
        if self._dispatcher.busy:
            spin = 0.0  # the next chunk's way through the system is better off with the core
        received = self._network.receive(max(0.0, wait), spin)
        self._leader_spin.waited(time.monotonic() - begun)
        while received is not None:
            self._dispatch(*received)
            count += 1
            if (self._handler_taken and self._pool.times.quick) or count == _MESSAGES_PER_TURN:
                break
            received = self._network.at_hand()

    def _do_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()
