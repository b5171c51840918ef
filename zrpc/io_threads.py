"""The two threads that take turns at an agent's inbox.

One *leads*: it receives, and where jobs are quick it runs them itself, which saves waking
another thread for each. The other *follows*: where the leader does not come back from a job, it
takes the lead, and the job goes on in what is then a thread like any other of the pool's.
A thread that makes one call after the other may receive the answers itself, see ``sit``: then the
leader *rests*, and looks now and then whether that goes on.
(After D. C. Schmidt et al., "Leader/Followers", in Pattern Languages of Program Design 4, 2000;
there the next leader is woken before each job, here only where the job turns out to be long.)
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from functools import partial

from zrpc.context_thread import ContextThread
from zrpc.pool import WorkerPool, set_host

__all__ = ["LONGEST_SITTING", "IoThreads"]

# A leader that is in one job for two looks of the follower, so many seconds apart, loses the
# lead: for as long nothing is received, hence no reply and no reference count.
_LOOK_EVERY = 0.001
# How often a leader that rests looks whether others still sit: what comes in for this worker when
# they do not waits for so long.
_LOOK_AT_REST = 0.0003
# A thread other than the leader receives for so many seconds at most.
LONGEST_SITTING = 0.002
# After so many looks without a new job the follower sleeps until it is woken.
_LOOKS_UNTIL_SLEEP = 2


class IoThreads:
    """Runs turns, one at a time, in two threads.

    Args:
        context: of the threads.
        name: the prefix of the threads' names.
        turn: waits for messages and handles them, not for long; it may leave a job by `take`.
        interrupt: makes a turn that waits end.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        context: contextvars.Context,
        name: str,
        turn: Callable[[], None],
        interrupt: Callable[[], None],
    ) -> None:
        self._turn = turn
        self._interrupt = interrupt
        self._threads = [ContextThread(context, f"{name}-{i}", self._serve, (i,)) for i in range(2)]
        # Guards all that follows but the job, which only the leader touches.
        self._lock = threading.Lock()
        self._leader = 0
        self._stopping = False
        self._jobs = 0  # begun so far
        self._busy = False  # the leader is in a job
        # Of each thread: whether it is there, to take the lead where need be; whether it sleeps;
        # and the gate at which it waits as a follower, for ever where it sleeps, which is open
        # where it is to look at once. Not of both together: who has given away the lead may be
        # back as a follower before the other one has woken, and must not take its wake-up call.
        self._ready = [False, False]
        self._asleep = [False, False]
        self._gates = [threading.Lock(), threading.Lock()]
        for gate in self._gates:
            gate.acquire()
        self._job: Callable[[], None] | None = None
        self._in_turn = 0  # the ident of the thread that is in a turn
        # Whoever receives holds the seat.
        self._seat = threading.Lock()
        self._receiving = False  # the leader is in a turn
        self._sittings = 0  # of threads other than the leader; guarded by the seat
        self._rest_until = 0.0
        # The leader rests here.
        self._rest = threading.Lock()
        self._rest.acquire()

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the threads after their turns and jobs, and waits for them but for the current.

        Afterwards no other thread receives either.

        Args:
            timeout: seconds to wait, for both together.

        Returns:
            False where a job still ran at the end of them; its thread is a daemon.
        """
        with self._lock:
            self._stopping = True
            for each in range(2):
                self._wake(each)
            self._end_rest()
        self._interrupt()
        deadline = time.monotonic() + timeout
        # A job of the first may stop them before the second has started; it will end at once.
        started = [thread for thread in self._threads if thread.ident is not None]
        others = [thread for thread in started if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._seat:
            return not any(thread.is_alive() for thread in others)

    def take(self, pool: WorkerPool, job: Callable[[], None]) -> bool:
        """Has the current thread run ``job`` after its turn, as a guest of ``pool``.

        Returns:
            False where it does not: it is in no turn, or has a job already, or the pool says no.
        """
        if (
            self._in_turn == threading.get_ident()
            and self._ready[1 - self._leader]
            and self._job is None
            and pool.admit(self._in_turn)
        ):
            self._job = partial(pool.run_as_guest, self._in_turn, [job])
            return True
        return False

    def give_way(self) -> None:
        """The current thread is about to wait in a job: the other one leads from now on."""
        me = self._threads.index(threading.current_thread())  # type: ignore[arg-type]
        with self._lock:
            if self._leader == me and self._busy:
                self._leader, self._busy = 1 - me, False
                self._wake(self._leader)

    def rest(self, until: float) -> None:
        """Has the leader rest after its turn, as long as others sit; of use in its turn only.

        Args:
            until: on the clock of ``time.monotonic``.
        """
        if self._in_turn == threading.get_ident():
            self._rest_until = until

    @property
    def resting(self) -> bool:
        """Whether the leader rests or is in a job just now, so that others may sit."""
        return not self._receiving

    def sit(self) -> bool:
        """Takes the seat, where the leader rests or is in a job: the current thread receives.

        For threads that no exception can interrupt until they `leave`.
        """
        if not self._seat.acquire(blocking=False):
            return False
        if self._stopping:
            self._seat.release()
            return False
        self._sittings += 1
        return True

    def leave(self) -> None:
        """Gives back the seat."""
        self._seat.release()

    def end_rest(self) -> None:
        """Has the leader receive again: there is something for it."""
        with self._lock:
            self._end_rest()

    def _end_rest(self) -> None:
        if self._rest.locked():
            self._rest.release()

    def _serve(self, me: int) -> None:
        """The life of one thread."""
        set_host(self)
        while not self._stopping:
            if self._leader == me:
                self._lead(me)
            else:
                self._follow(me)

    def _lead(self, me: int) -> None:
        with self._seat:
            self._in_turn = threading.get_ident()
            self._receiving = True
            try:
                self._turn()
            finally:
                self._receiving = False
                self._in_turn = 0
        job, self._job = self._job, None
        if job is None:
            if self._rest_until:
                self._rest_while_others_sit()
            return
        self._rest_until = 0.0  # time has passed when the job is done
        with self._lock:
            self._jobs += 1
            self._busy = True
            if self._asleep[1 - me]:
                self._wake(1 - me)
        try:
            job()
        finally:
            with self._lock:
                if self._leader == me:
                    self._busy = False

    def _rest_while_others_sit(self) -> None:
        until, self._rest_until = self._rest_until, 0.0
        sittings = -1
        while self._sittings != sittings and time.monotonic() < until and not self._stopping:
            sittings = self._sittings
            if self._rest.acquire(timeout=_LOOK_AT_REST):
                return

    def _follow(self, me: int) -> None:
        """Watches the leader; returns when this thread is to lead, or to end."""
        looks = 0
        while True:
            with self._lock:
                jobs, asleep = self._jobs, looks >= _LOOKS_UNTIL_SLEEP and not self._busy
                if self._leader == me or self._stopping:
                    return
                self._asleep[me] = asleep
                self._ready[me] = True
            woken = self._gates[me].acquire(timeout=-1 if asleep else _LOOK_EVERY)
            with self._lock:
                self._asleep[me] = False
                if self._busy and self._jobs == jobs and not woken:
                    self._leader, self._busy = me, False
                if self._leader == me or self._stopping:
                    self._ready[me] = False
                    return
                looks = looks + 1 if self._jobs == jobs else 0

    def _wake(self, thread: int) -> None:
        """Has a follower look at once; the lock is held."""
        if self._gates[thread].locked():
            self._gates[thread].release()
