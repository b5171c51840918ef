"""Which thread receives now: the two I/O threads of an agent, and callers in their place.

Exactly one thread receives at a time. It holds the *seat*.

=========== ==================== ========================================= =========================
State       Thread               What it does                              What ends it
=========== ==================== ========================================= =========================
leading     one I/O thread       holds the seat and receives; then, off    its job is about to wait
                                 the seat, runs the job that its turn      (``give_way``) or takes
                                 has taken (``run``), if jobs are short;   too long: it follows
                                 waits off the seat for the next message,
                                 if a caller may sit; pauses, if one is
                                 expected to
following   the other I/O thread checks every 1 to 4 ms whether the        promotion: it leads
                                 leader is still in the same job; sleeps
                                 if there are no jobs
sitting     a caller that waits  holds the seat and receives in place of   its answer has come, or a
            for its answer       the leader, which waits off the seat or   time limit (``receive``)
                                 is in a job; no message wakes the leader
=========== ==================== ========================================= =========================

A thread that makes several calls at once, and then waits for them, sits only then. If the leader
received the first answers in the meantime, both would run by turns, and hand the interpreter's lock
to each other. So if a caller has just sat, and messages come while calls are in flight, the leader
pauses. Measured: each of five calls that are made at once takes 45 us, and 80 without pauses.

A leader that runs a short job itself saves waking another thread. If the job is not short, the
follower is promoted and receives, and the job goes on in what is now a thread like any other of
the pool. A thread that makes one call after the other receives the answers itself, which saves
waking it, and the leader.

This is the Leader/Followers pattern (D. C. Schmidt et al., in Pattern Languages of Program Design
4, 2000). There the next leader is promoted before each job, here only if the job turns out to be
long.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable, Sized
from functools import partial
from typing import Any, Protocol

from zrpc.runtime.context_thread import ContextThread
from zrpc.runtime.interrupts import run_interruptibly, uninterrupted
from zrpc.runtime.job_times import JobTimes
from zrpc.runtime.resource_limits import stack_is_full
from zrpc.runtime.thread_errors import printing_errors
from zrpc.runtime.thread_pool import HandlerPool, lend_thread

logger = logging.getLogger(__name__)

# Seconds between two checks of the follower: at first, and at most. A leader that is in the same
# job at both loses the lead: in the meantime nothing is received, neither replies nor reference
# counts. The time doubles with each check, since each takes the interpreter's lock from a job.
_CHECK_SECONDS = 0.001
_MAX_CHECK_SECONDS = 0.004
# Seconds that a thread other than the leader receives at most. Ctrl-C waits for it.
_LONGEST_SITTING = 0.01
# If calls are in flight and a caller has begun to sit within the last `_LONGEST_SITTING`, it is
# expected to sit again for their answers. What comes meanwhile waits for a pause of this many
# seconds, or for more, as long as further calls are made in each. There is one such wait at most
# until a caller sits again.
_PAUSE_SECONDS = 0.0005
_MOST_PAUSES = 8
# Seconds between two looks of the leader at the seat that another thread holds.
_SEAT_CHECK_SECONDS = 0.1
# Seconds in which a turn ends that is interrupted.
_TURN_SECONDS = 0.5
# After this number of checks without a new job, the follower sleeps until it is woken.
_CHECKS_BEFORE_SLEEP = 2


class Source(Protocol):
    """A source of messages: `zrpc.transport.network.Network`."""

    @property
    def mask(self) -> Callable[[], None]:
        """From now on, no message that comes ends a `wait`."""

    @property
    def unmask(self) -> Callable[[], None]:
        """Each does again."""

    @property
    def wait(self) -> Callable[[float], object]:
        """Waits until there may be messages, at most a number of seconds."""

    def wake(self) -> None:
        """Ends a `wait`, or a turn that waits."""


class LeaderFollower:
    """Runs turns in two threads, one turn at a time.

    Args:
        context: the threads' context.
        name: the prefix of the threads' names.
        turn: waits for messages, at most until a time, and handles them; it may leave a job by
            `run`. It returns until when nothing is due, unless a message comes; 0 if it has
            received one, and less if there are others that don't end a wait for messages.
        source: of the messages.

    Attributes:
        turn_ident: the ident of the leader's thread while it is in a turn; else 0. If the leader
            waits or is in a job, another thread may sit.
        job_pool: the pool whose job the leader runs after its turn; None if it runs none.
        in_flight: the calls whose answers threads wait for; set before the start.
        seat: held by the thread that receives.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        context: contextvars.Context,
        name: str,
        turn: Callable[[float], float],
        source: Source,
    ) -> None:
        self._turn = turn
        self._source = source
        self.in_flight: Sized = ()
        # It knows its owner: an exception that is set in a thread may come as soon as it is taken.
        self.seat: Any = threading.RLock()
        self._threads = [ContextThread(context, f"{name}-{i}", self._serve, (i,)) for i in range(2)]
        # Guards what follows, up to the gates.
        self._lock = threading.Lock()
        self._leader = 0
        self._stopping = False
        self._job_count = 0  # jobs begun
        self._busy = False  # the leader is in a job
        # For each thread: whether it follows and can be promoted; whether it sleeps; and the gate
        # at which it waits as a follower, without limit if it sleeps, and at which the leader
        # pauses. Opening the gate makes it go on at once. Each thread has its own gate: a thread
        # that has just given away the lead may follow before the other one is awake, and must not
        # take that one's wake-up.
        self._ready = [False, False]
        self._asleep = [False, False]
        self._gates = [threading.Lock(), threading.Lock()]
        for gate in self._gates:
            gate.acquire()
        # Only the leader writes what follows, without a lock: its job, with the times of that
        # job's pool; its ident while it is in a turn; when its next turn must begin, and whether
        # others may take the seat until then; and whether it pauses.
        self._job: Callable[[], None] | None = None
        self.job_pool: HandlerPool | None = None
        self._job_times: JobTimes | None = None
        self.turn_ident = 0
        self._due, self._yields = 0.0, False
        self._pauses = False
        # Until when a caller is expected to sit; any thread may write it.
        self._expected_until = 0.0
        # The gates for which threads, by ident, waited while another one received; and until when
        # each counts. Single operations on the dict are atomic.
        self._awaited: dict[int, tuple[threading.Lock, float]] = {}

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float) -> bool:
        """Stops both threads after their turns and jobs, and waits for them.

        It does not wait for the current thread. Afterwards no other thread receives either.

        Args:
            timeout: seconds to wait, for both together.

        Returns:
            False if a job was still running when the timeout passed; its thread is a daemon.
        """
        with uninterrupted, self._lock:
            self._stopping = True
            for each in range(2):
                self._wake(each)
        self._source.wake()
        deadline = time.monotonic() + timeout
        # A job of the first thread may call this before the second one has started. The second
        # one then ends at once.
        started = [thread for thread in self._threads if thread.ident is not None]
        others = [thread for thread in started if thread is not threading.current_thread()]
        try:
            for thread in others:
                run_interruptibly(thread.join, max(0.0, deadline - time.monotonic()))
        except BaseException:  # of a signal's handler; the caller closes the sockets
            for thread in others:
                thread.join(_TURN_SECONDS)
            raise
        finally:
            with uninterrupted, self.seat:  # a caller that sits ends its turn first
                pass
        return not any(thread.is_alive() for thread in others)

    def run(self, pool: HandlerPool, job: Callable[[], None]) -> None:
        """Runs a job of a pool: in the pool, or as its guest in this thread after its turn.

        The latter if this thread leads and has no job yet, the other thread can be promoted, and
        the pool admits this one.
        """
        if (
            self.turn_ident == threading.get_ident()
            and self._ready[1 - self._leader]
            and self._job is None
            and pool.admit(self.turn_ident)
        ):
            self._job = partial(pool.run_as_guest, self.turn_ident, [job])
            self.job_pool = pool
            self._job_times = pool.times
        else:
            pool.submit(job)

    def relieve(self, pool: HandlerPool, alone: bool = False) -> None:
        """Relieves a pool, in a turn; runs its jobs in this thread if the system refuses it one.

        Args:
            pool: see `HandlerPool.relieve`.
            alone: whether its jobs are so quick that no other thread need be ready to receive.
        """
        # A caller that sits waits for an answer, and runs no job.
        free = self._job is None and (alone or self._ready[1 - self._leader])
        jobs = pool.relieve(self.turn_ident if free else 0)
        if jobs:
            self._job = partial(pool.run_as_guest, self.turn_ident, jobs)
            self.job_pool, self._job_times = pool, pool.times

    def give_way(self) -> None:
        """Promotes the other thread, since the current one is about to wait in its job."""
        me = self._threads.index(threading.current_thread())  # type: ignore[arg-type]
        with self._lock:
            if self._leader == me and self._busy:
                self._leader, self._busy = 1 - me, False
                self._wake(self._leader)

    def receive(self, gate: threading.Lock, timeout: float = -1) -> None:
        """Receives until a gate opens, in the thread that waits for it, if no other thread does.

        So no other thread need wake up. After some milliseconds the leader goes on; it does all the
        time if several threads wait. The calling thread has signal handlers held back.

        Args:
            gate: opened by what is to be received.
            timeout: seconds; negative means without limit.
        """
        end = time.monotonic() + (
            _LONGEST_SITTING if timeout < 0 else min(_LONGEST_SITTING, timeout)
        )
        # With little room on the stack, messages that are read already would be lost.
        busy = self.turn_ident or self.seat._is_owned() or stack_is_full()
        ident = threading.get_ident()
        if busy or (self._awaited and self._waited().keys() - {ident}):
            self._awaited[ident] = gate, end
            return
        sits, due = False, 0.0
        try:
            if not self.seat.acquire(blocking=False):
                self._awaited[ident] = gate, end
            elif not self._stopping:
                sits = True
                self._expected_until = end
                self._source.mask()
                while gate.locked() and time.monotonic() < end:
                    due = self._turn(end)
        finally:
            if self.seat._is_owned():
                if sits:
                    self._source.unmask()
                self.seat.release()
                if due < 0:
                    self._source.wake()

    def hurry(self) -> None:
        """Ends a pause of the leader: the current thread waits, and does not receive.

        It has signal handlers held back.
        """
        self._expected_until = 0.0
        if self._pauses:
            with self._lock:
                self._wake(self._leader)

    def _pause(self, me: int) -> None:
        """Leaves what has come to a caller that is expected to sit, and may make calls first."""
        self._expected_until, self._pauses, before = 0.0, True, 0
        for _ in range(_MOST_PAUSES):
            count = len(self.in_flight)
            if count <= before or self._gates[me].acquire(timeout=_PAUSE_SECONDS):
                break
            before = count
        self._pauses = False

    def _waited(self) -> dict[int, threading.Lock]:
        """Returns the gates for which threads have waited of late, by ident; forgets the others."""
        now = time.monotonic()
        found = list(self._awaited.items())
        for ident, (_, until) in found:
            if now > until:
                self._awaited.pop(ident, None)
        return {ident: gate for ident, (gate, until) in found if now <= until}

    def _serve(self, me: int) -> None:
        """The life of one thread."""
        lend_thread(self.give_way)
        while not self._stopping:
            try:
                if self._leader == me:
                    self._lead(me)
                else:
                    self._follow(me)
            except Exception:  # no memory for a frame, for example: else nobody receives
                with printing_errors():
                    logger.exception("an I/O thread goes on after an error")

    def _lead(self, me: int) -> None:
        if self._yields:
            self._source.wait(max(0.0, self._due - time.monotonic()))
            if time.monotonic() < self._expected_until and self.in_flight:
                self._pause(me)
        try:
            if not self.seat.acquire(blocking=False):
                # The caller that sits does what is due.
                self._due, self._yields = time.monotonic() + _SEAT_CHECK_SECONDS, True
                return
            self.turn_ident = threading.get_ident()
            self._due = self._turn(0.0 if self._yields else math.inf)
        finally:
            self.turn_ident = 0
            if self.seat._is_owned():
                self.seat.release()
        # After the answer to the only call, the next one is left to the thread that has waited for
        # it, if it is the only thread that waits.
        gates = [*self._waited().values()] if self._awaited and not self.in_flight else []
        self._yields = self._due > 0 or (len(gates) == 1 and not gates[0].locked())
        job, self._job, self.job_pool = self._job, None, None
        if job is None:
            return
        try:
            with self._lock:
                self._job_count += 1
                self._busy = True
                if self._asleep[1 - me]:
                    self._wake(1 - me)
            job()
        except BaseException:
            job()  # there was no memory for its frame, for example; it does nothing if it has begun
            raise
        finally:
            with self._lock:
                if self._leader == me:
                    self._busy = False

    def _follow(self, me: int) -> None:
        """Watches the leader; returns when this thread must lead or end."""
        checks = 0
        pause = _CHECK_SECONDS
        while True:
            with self._lock:
                # Also if it was promoted between two checks: it does not follow as it leads.
                self._ready[me] = self._leader != me and not self._stopping
                if not self._ready[me]:
                    return
                jobs = self._job_count
                asleep = self._asleep[me] = checks >= _CHECKS_BEFORE_SLEEP and not self._busy
            woken = self._gates[me].acquire(timeout=-1 if asleep else pause)
            with self._lock:
                self._asleep[me] = False
                if self._busy and self._job_count == jobs and not woken:
                    self._leader, self._busy = me, False
                    if self._job_times is not None:
                        self._job_times.overran()
                checks = checks + 1 if self._job_count == jobs else 0
            pause = _CHECK_SECONDS if asleep else min(2 * pause, _MAX_CHECK_SECONDS)

    def _wake(self, thread: int) -> None:
        """Ends the wait of a thread at its gate; the lock is held."""
        if self._gates[thread].locked():
            self._gates[thread].release()
