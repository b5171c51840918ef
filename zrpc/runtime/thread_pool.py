"""The threads that run handlers: a pool that grows while its threads wait.

The pool's size limits the handlers that *run*. A thread that waits for another call (see
`pass_gate`) is not running, so while it waits another thread may take its place: nested calls
can't deadlock at any depth. A thread that waits in a way that can't be seen from here
(for the user's own lock, in ``torch.futures.wait_all``) is found by `HandlerPool.relieve`.

A thread that does not belong to the pool may run its jobs as a *guest*, see `HandlerPool.admit`.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from zrpc.runtime import forks, garbage_collector
from zrpc.runtime.context_thread import ContextThread
from zrpc.runtime.interrupts import pass_interruptibly, run_interruptibly, uninterrupted
from zrpc.runtime.job_context import copies_of
from zrpc.runtime.job_times import QUICK_JOB_SECONDS, JobTimes
from zrpc.runtime.pool_load import PoolLoad
from zrpc.runtime.resource_limits import advice, stack_is_full
from zrpc.runtime.thread_errors import printing_errors
from zrpc.runtime.unseen_waits import UnseenWaits

logger = logging.getLogger(__name__)

# One that answers a request has a method ``fail(error)``, which is called if it raises an error.
# Any other is done once more if there was no memory for it.
Job = Callable[[], None]

# More threads than this wait at once only if a program recurses without end.
MAX_THREADS = 4096
# The minimum between two reports that the system refuses a thread.
_REPORT_SECONDS = 10.0


class _Thread(threading.local):
    # .pool is the HandlerPool whose job the current thread runs, if any.
    # .begun is when that job began, plus the time that it has waited since; .blocked is when its
    # latest wait began.
    # .ending is whether the job is in its `end_with`, and has submitted nothing there.
    ending = False

    def give_way(self) -> None:
        """Lets a guest wait; see `lend_thread`."""


_thread = _Thread()
# Returns the pool whose job the current thread runs, or None. In C, as each call asks.
current_pool: Callable[[], HandlerPool | None] = partial(getattr, _thread, "pool", None)


def lend_thread(give_way: Callable[[], None]) -> None:
    """Lends the current thread to pools as a guest; its job calls ``give_way`` before it waits."""
    _thread.give_way = give_way  # type: ignore[method-assign]


def pass_gate(
    gate: threading.Lock,
    timeout: float = -1,
    receive: Callable[[threading.Lock, float], None] | None = None,
) -> bool:
    """Waits until ``gate`` is open, and lets the pool replace this thread meanwhile.

    Every wait for another worker goes through here. Signals interrupt it in the main thread.

    Args:
        gate: a lock that is held until it is opened, and stays open then.
        timeout: seconds; negative means without limit.
        receive: called first, with gate and timeout, if the gate is closed: for a short time this
            thread may itself receive what opens it. Signal handlers are held back meanwhile.

    Returns:
        False if the timeout passed first.

    Raises:
        RpcError: what opens the gate might wait for this thread.
    """
    if not gate.locked():
        return True
    if garbage_collector.running:
        garbage_collector.check()
    pool = current_pool()
    if pool is not None:
        pool._block()
    try:
        if receive is not None:
            with uninterrupted:
                receive(gate, timeout)
            if not gate.locked():
                return True
        if pool is not None:
            _thread.give_way()
        return pass_interruptibly(gate, timeout)
    finally:
        if pool is not None:
            pool._unblock()


def end_with(work: Callable[[], object]) -> None:
    """Does the last work of the current job, if a job calls this.

    The first job that it submits to the same pool is left to this thread: to wake another one
    takes longer than what is left of this job.
    """
    _thread.ending = True
    try:
        work()
    finally:
        _thread.ending = False


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Lets the pool replace this thread while it waits in the block for anything else."""
    pool = current_pool()
    if pool is None:
        yield
        return
    pool._block()
    try:
        _thread.give_way()
        yield
    finally:
        pool._unblock()


class HandlerPool:
    """Runs jobs in threads that start when first needed, at most ``size`` of them running.

    Args:
        size: the number of jobs that may run at once.
        name: the prefix of the threads' names.
        context: every job runs in a copy of its own.

    Attributes:
        times: how long jobs run, without their waits.

    All methods may be called from any thread.
    """

    def __init__(self, size: int, name: str, context: contextvars.Context | None = None) -> None:
        self._size = size
        self._name = name
        self._context = context or contextvars.Context()
        self._copy_of_context = copies_of(self._context)
        # Guards everything below. No other lock is taken while it is held, and nothing is logged:
        # the program's log handlers may make calls.
        self._lock = threading.Lock()
        self._backlog: deque[Job] = deque()
        self._full_since = 0.0  # the backlog has never been empty since then
        self._threads: set[_PoolThread] = set()
        self._idle: list[_PoolThread] = []  # last in, first out: that one is warmest
        self._guests: set[int] = set()  # the idents of admitted threads
        self._running = 0  # threads with a job, without those in pass_gate()
        # Those of them that were idle, and have not begun it. While jobs are short, one at a time
        # is woken: the others take longer to wake than the first one for all jobs.
        self._waking: set[_PoolThread] = set()
        self._closed = False
        self._numbers = itertools.count()
        self._refusal: RuntimeError | None = None  # of a thread for the latest queued job
        self._begun_at = 0.0  # when the latest job began, on the clock of time.perf_counter
        # For relieve(), which only the agent's leader calls.
        self._begun_before = -1.0
        self._unseen = UnseenWaits()
        self._next_report = 0.0  # of a refusal, on the clock of time.monotonic
        self.times = JobTimes()

    def submit(self, job: Job) -> None:
        """Queues ``job``. If it raises, the error is logged. After `close` the job is dropped."""
        with uninterrupted, self._lock:
            if self._closed:
                return
            if not self._backlog:
                self._full_since = time.monotonic()
            self._backlog.append(job)  # first: whatever fails after that, `relieve` starts it
            if _thread.ending and current_pool() is self:
                _thread.ending = False  # this thread takes it next
            elif self._running < self._size and not (self._waking and self.times.short):
                self._start_next()

    @property
    def active(self) -> int:
        """The number of jobs that are queued, run or wait."""
        with uninterrupted, self._lock:
            threads = len(self._threads) + len(self._guests)
            return len(self._backlog) + threads - len(self._idle)

    def load(self, limit: int) -> PoolLoad:
        """Returns how much there is to do, with at most ``limit`` of the queued jobs."""
        with uninterrupted, self._lock:
            at_work = len(self._threads) + len(self._guests) - len(self._idle)
            full_for = time.monotonic() - self._full_since if self._backlog else 0.0
            return PoolLoad(
                self._size,
                self._running,
                at_work - self._running,
                len(self._idle),
                len(self._threads),
                full_for,
                min(full_for, time.perf_counter() - self._begun_at),
                len(self._backlog),
                list(itertools.islice(self._backlog, limit)),
            )

    def admit(self, ident: int) -> bool:
        """Admits the current thread, with this ident, as a guest; it must call `run_as_guest` next.

        Returns:
            False if it is not admitted: jobs are not short, and there can be threads for them; or
            another one runs, and this one may run beside it.
        """
        if not self.times.short and (self._refusal is None or self._idle):
            return False
        with self._lock:
            if self._closed or self._running:
                return False
            self._running += 1
            self._guests.add(ident)
            return True

    def run_as_guest(self, ident: int, jobs: list[Job]) -> None:
        """Runs a job in the current thread, which was admitted, and then queued jobs.

        It begins no queued job once all together have taken longer than one quick job, unless the
        system refuses the pool a thread.

        Args:
            ident: the thread's ident.
            jobs: a list with the job, which is taken out: it must not be kept alive with its
                arguments, which may be large, while another job runs. Nothing is done if it is
                empty: this was called before.
        """
        if not jobs:
            return
        _thread.pool = self
        end = time.perf_counter() + QUICK_JOB_SECONDS
        try:
            while jobs:
                self._do(jobs)
                if self._backlog:
                    self._take_next(jobs, end)
        finally:
            _thread.pool = None
            with self._lock:
                self._backlog.extend(jobs)  # one that has not begun, for lack of memory
                jobs.clear()
                self._guests.discard(ident)
                self._running -= 1
                if self._backlog and self._running < self._size and not self._closed:
                    self._start_next()

    def _take_next(self, jobs: list[Job], end: float) -> None:
        """Takes a queued job for a guest, if there is time."""
        if time.perf_counter() > end and self._refusal is None:
            return
        with self._lock:
            if self._backlog and self._running <= self._size and not self._closed:
                jobs.append(self._backlog.popleft())

    def discard(self, useless: Callable[[Job], bool]) -> None:
        """Drops the queued jobs for which ``useless(job)`` is true. ``useless`` must be quick."""
        with self._lock:
            before = self._backlog  # freed without the lock, as in `close`
            self._backlog = deque(job for job in before if not useless(job))

    def relieve(self, guest: int = 0) -> list[Job]:
        """Starts threads in place of those that wait unseen; tries again what the system refused.

        Must be called periodically. If jobs are queued and none was begun since the last call,
        every thread that used no processor time since then is assumed to be waiting.

        Args:
            guest: the ident of the current thread if it may run a job for lack of others; else 0.

        Returns:
            a list with that job, if any: the thread is admitted, and must call `run_as_guest` next.
        """
        with self._lock:
            stuck = bool(self._backlog) and self._begun_at == self._begun_before
            self._begun_before = self._begun_at
            threads = self._at_work() if stuck else set()
        waiting = self._unseen.count(threads)
        refusal = None
        with self._lock:
            # Fewer run than may if the system has refused a thread: nothing else tries again.
            count = max(waiting, self._running < self._size)
            for _ in range(min(count, len(self._backlog))):
                if not self._start_next():
                    refusal = self._refusal
                    break
        if refusal is None:
            return []
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_SECONDS
            text = "Can't start another thread for %s; a call waits (%s)"
            logger.error(text, self._name, advice(refusal) or refusal)
        with self._lock:
            if not guest or not self._backlog or self._closed:
                return []
            self._running += 1
            self._guests.add(guest)
            return [self._backlog.popleft()]

    def _at_work(self) -> set[int]:
        """Returns the idents of the threads that have a job; the lock is held."""
        own = self._threads.difference(self._idle)
        return self._guests | {thread.ident for thread in own if thread.ident is not None}

    def close(self, timeout: float, finish: bool = False) -> bool:
        """Stops the threads when their current jobs are done, and drops queued jobs.

        Args:
            timeout: seconds to wait for them, all together.
            finish: whether to run queued jobs first, as far as the timeout allows.

        Returns:
            False if a job was still running when the timeout passed; its thread is a daemon and
            ends with its job.
        """
        deadline = time.monotonic() + timeout
        # Freed without the lock: the finalizer of what a job holds may submit another one.
        dropped = deque[Job]()
        with uninterrupted, self._lock:
            self._closed = True
            if not finish:
                dropped, self._backlog = self._backlog, dropped
            here = threading.current_thread()
            if self._backlog and not self._threads.difference(self._idle, {here}):
                # The backlog waits for the current thread, or for a guest that won't come back.
                self._start_next()
            for thread in self._idle:
                thread.gate.release()
            self._idle.clear()
            threads = self._threads - {here}
        for thread in threads:
            run_interruptibly(thread.join, max(0.0, deadline - time.monotonic()))
        with uninterrupted, self._lock:
            dropped.extend(self._backlog)
            self._backlog.clear()
        return not any(thread.is_alive() for thread in threads)

    def _start_next(self) -> bool:
        """Gives the first of the queued jobs to an idle thread or to a new one; the lock is held.

        If the system refuses a thread, or the start of one could fail halfway for lack of stack,
        the job stays queued; see `relieve`. So it is counted only after what can fail.

        Returns:
            False if the job stays queued.
        """
        job = self._backlog[0]
        if self._idle:
            thread = self._idle.pop()
            self._waking.add(thread)
            thread.jobs.append(job)
            thread.gate.release()
        elif stack_is_full():
            return False
        else:
            try:
                if len(self._threads) >= MAX_THREADS:
                    raise RuntimeError(f"there are {MAX_THREADS} threads already")
                thread = _PoolThread(self, f"{self._name}-{next(self._numbers)}", job)
                thread.start()
            except RuntimeError as error:
                self._refusal = error.with_traceback(None)  # which has the job
                return False
            self._threads.add(thread)
        self._refusal = None
        self._backlog.popleft()
        self._running += 1
        return True

    def _run(self, thread: _PoolThread) -> None:
        """The life of one thread."""
        _thread.pool = self
        goes_on = True
        while goes_on:
            try:
                if thread.jobs:
                    self._do(thread.jobs)
                goes_on = self._await_job(thread)
            except BaseException:  # no memory for a frame, for example
                with printing_errors():
                    logger.exception("A thread of %s goes on after an error", self._name)

    def _do(self, jobs: list[Job]) -> None:
        """Does the last of some jobs, and takes it out."""
        _thread.begun = self._begun_at = time.perf_counter()
        generation = forks.generation
        job = jobs.pop()
        try:
            self._copy_of_context().run(job)
        except BaseException as error:
            with printing_errors():
                fail = getattr(job, "fail", None)
                if fail is not None:
                    fail(error)
                else:
                    logger.exception("A job of %s failed; its thread goes on", self._name)
                    if isinstance(error, (MemoryError, RecursionError)):
                        self._copy_of_context().run(job)  # somebody may wait for what it does
        if generation != forks.generation:  # a callback has forked, and has returned in the child
            forks.exit_child()
        self.times.took(time.perf_counter() - _thread.begun)

    def _await_job(self, thread: _PoolThread) -> bool:
        """Waits for the thread's next job; returns False if the thread must end."""
        with self._lock:
            # If some threads came back from a wait, more run than may: this one makes room.
            # After close() it works off the backlog regardless of what else runs.
            if self._backlog and (self._running <= self._size or self._closed):
                thread.jobs.append(self._backlog.popleft())
                return True
            self._running -= 1
            if self._closed or len(self._idle) >= self._size:
                self._threads.discard(thread)
                return False
            self._idle.append(thread)
        thread.gate.acquire()  # until _start_next or close
        with self._lock:
            self._waking.discard(thread)
            if not thread.jobs:
                self._threads.discard(thread)
            elif self._backlog and self._running < self._size:
                self._start_next()  # this job may turn out to be long
        return bool(thread.jobs)

    def _block(self) -> None:
        """Lets another thread run in place of the current one, which is about to wait."""
        _thread.blocked = time.perf_counter()
        with self._lock:
            self._running -= 1
            if self._backlog and self._running < self._size:
                self._start_next()

    def _unblock(self) -> None:
        _thread.begun += time.perf_counter() - _thread.blocked
        with self._lock:
            self._running += 1


class _PoolThread(ContextThread):
    """One thread of a pool, with its next job, if any, and the gate at which it idles."""

    def __init__(self, pool: HandlerPool, name: str, job: Job) -> None:
        super().__init__(pool._context, name, pool._run, (self,))
        self.jobs = [job]
        self.gate = threading.Lock()
        self.gate.acquire()


def in_pool(pool: HandlerPool) -> bool:
    """Returns whether the current thread runs a job of this pool."""
    return current_pool() is pool
