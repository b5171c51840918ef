"""The threads that run handlers: a pool that grows while its threads wait.

The pool's size bounds the handlers that *run*. A thread that waits for another call (see
`acquire`) is not running, so while it waits another thread may take its place: nested calls
can't deadlock at any depth. A thread that waits in a way that can't be seen from here
(a lock of the user's, ``torch.futures.wait_all``) is found by `WorkerPool.relieve`.

A thread that is not of the pool may run a job in the pool's name as a *guest*, see `admit`.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from zrpc.context_thread import ContextThread

__all__ = ["Host", "Load", "WorkerPool", "acquire", "in_handler", "in_pool", "set_host"]

logger = logging.getLogger(__name__)

Job = Callable[[], None]

# More threads than this wait at once only where a program recurses without end.
MAX_THREADS = 4096

# Handing a job to another thread costs some 10 microseconds or more. Where jobs take longer
# than this, in seconds, that matters less than to run them side by side.
_QUICK = 100e-6
# One job that takes long says no more about the next than one of this many seconds.
_LONGEST_COUNTED = 1e-3
_WEIGHT_OF_LAST = 0.1

# .pool is the WorkerPool for which the current thread runs a job, where it does.
# .host is what lent the thread to the pool, where it is a guest there.
_thread = threading.local()


class Load(NamedTuple):
    """What a pool has to do.

    Attributes:
        size: how many jobs may run at once.
        running: how many do, those left out that wait for another worker.
        threads: how many threads there are.
        begun: how many jobs were ever begun, about.
        queued: how many jobs wait for a thread.
        backlog: the first of those.
    """

    size: int
    running: int
    threads: int
    begun: int
    queued: int
    backlog: list[Job]


class Host(Protocol):
    """What has threads that run jobs as guests of a pool."""

    def give_way(self) -> None:
        """The current thread, a guest in a job, is about to wait."""


def set_host(host: Host) -> None:
    """Notes whose the current thread is."""
    _thread.host = host


def acquire(
    gate: threading.Lock, timeout: float = -1, receive: Callable[[], None] | None = None
) -> bool:
    """Acquires ``gate``, and lets the pool replace this thread while it waits.

    Every wait for another worker goes through here. Ctrl-C interrupts it in the main thread.

    Args:
        gate: the lock to acquire.
        timeout: seconds; negative means without limit, as in ``threading.Lock.acquire``.
        receive: called first where the gate is closed: for a short time this thread may itself
            receive what opens it.

    Returns:
        False where the timeout passed first.
    """
    if gate.acquire(blocking=False):
        return True
    pool: WorkerPool | None = getattr(_thread, "pool", None)
    if pool is None:
        if receive is not None:
            receive()
        return gate.acquire(timeout=timeout)
    pool._block()
    try:
        if receive is not None:
            receive()
            if gate.acquire(blocking=False):
                return True
        host: Host | None = getattr(_thread, "host", None)
        if host is not None:
            host.give_way()
        return gate.acquire(timeout=timeout)
    finally:
        pool._unblock()


class WorkerPool:
    """Runs jobs in threads that start when first needed, at most ``size`` of them running.

    Args:
        size: how many jobs may run at once.
        name: the prefix of the threads' names.
        context: every thread runs in a copy of it, so that context variables set there (the
            current agent) hold in all jobs.

    All methods may be called from any thread.
    """

    def __init__(self, size: int, name: str, context: contextvars.Context | None = None) -> None:
        self._size = size
        self._name = name
        self._context = context or contextvars.Context()
        # The lock guards all that follows. It is held for a few instructions at a time, and
        # no other lock is taken under it.
        self._lock = threading.Lock()
        self._backlog: deque[Job] = deque()
        self._threads: set[_PoolThread] = set()
        self._idle: list[_PoolThread] = []  # the last one in is warmest, and the first out
        self._guests: set[int] = set()  # the idents of those admitted
        self._running = 0  # threads with a job, less those that wait in acquire()
        self._closed = False
        self._numbers = itertools.count()
        # For relieve(), which only the agent's I/O thread calls.
        self._begun = 0
        self._begun_before = -1
        self._cpu_before: dict[int, float | None] = {}
        # How long jobs took of late, in seconds; updates may get lost, which does no harm.
        self._usual_time = 0.0

    def submit(self, job: Job) -> None:
        """Queues ``job``; should it raise, that is logged and its thread goes on.

        After `close` the job is dropped.
        """
        with self._lock:
            if self._closed:
                return
            if self._running < self._size:
                self._running += 1
                self._hand_over(job)
            else:
                self._backlog.append(job)

    @property
    def active(self) -> int:
        """How many jobs are queued, run or wait."""
        with self._lock:
            threads = len(self._threads) + len(self._guests)
            return len(self._backlog) + threads - len(self._idle)

    def load(self, most: int) -> Load:
        """How much there is to do, and so many of the jobs that are queued."""
        with self._lock:
            return Load(
                self._size,
                self._running,
                len(self._threads),
                self._begun,
                len(self._backlog),
                list(itertools.islice(self._backlog, most)),
            )

    @property
    def begun(self) -> int:
        """How many jobs were ever begun, about."""
        return self._begun

    @property
    def queued(self) -> int:
        """How many jobs wait for a thread."""
        return len(self._backlog)

    def admit(self, ident: int) -> bool:
        """Takes the current thread, of this ident, as a guest, to call `run_as_guest` next.

        Returns:
            False where it is not to: another job runs, beside which this one may run, or jobs
            are not quick.
        """
        if self._usual_time > _QUICK:
            return False
        with self._lock:
            if self._closed or self._running:
                return False
            self._running += 1
            self._guests.add(ident)
            return True

    def run_as_guest(self, ident: int, jobs: list[Job]) -> None:
        """Runs a job in the current thread, which was admitted, and what is queued behind it.

        Of that no more than what takes together about as long as one job that is quick.

        Args:
            ident: the thread's.
            jobs: the job, to be taken out: it must not live on with its arguments, which may be
                large, while another one runs.
        """
        _thread.pool = self
        end = time.perf_counter() + _QUICK
        following: Job | None = jobs.pop()
        try:
            while following is not None:
                self._do(following)
                following = self._next_of_guest(end)
        finally:
            _thread.pool = None
            with self._lock:
                self._guests.discard(ident)
                self._running -= 1
                if self._backlog and self._running < self._size and not self._closed:
                    self._start_next()

    def _next_of_guest(self, end: float) -> Job | None:
        if not self._backlog or time.perf_counter() > end:
            return None
        with self._lock:
            if self._backlog and self._running <= self._size and not self._closed:
                return self._backlog.popleft()
            return None

    def discard(self, useless: Callable[[Job], bool]) -> None:
        """Drops the queued jobs for which ``useless(job)`` is true; it must be quick."""
        with self._lock:
            self._backlog = deque(job for job in self._backlog if not useless(job))

    def relieve(self) -> None:
        """Starts threads in place of those that wait unseen; called now and then.

        Where jobs are queued and none was begun since the last call, every thread that used
        no processor time since then is taken to be waiting.
        """
        with self._lock:
            stuck = bool(self._backlog) and self._begun == self._begun_before
            self._begun_before = self._begun
            threads = self._at_work() if stuck else set()
        cpu = {ident: _cpu_time(ident) for ident in threads}
        waiting = sum(
            ident in self._cpu_before and self._cpu_before[ident] == used
            for ident, used in cpu.items()
        )
        self._cpu_before = cpu
        with self._lock:
            for _ in range(min(waiting, len(self._backlog))):
                self._start_next()

    def _at_work(self) -> set[int]:
        """The idents of the threads that have a job; the lock is held."""
        own = self._threads.difference(self._idle)
        return self._guests | {thread.ident for thread in own if thread.ident is not None}

    def close(self, timeout: float, finish: bool = False) -> bool:
        """Ends the threads once their present jobs are done, and drops queued jobs.

        Args:
            timeout: seconds to wait for them, all together.
            finish: whether to do first what is queued, as far as that time allows.

        Returns:
            False where a job was still running when the timeout passed; its thread is a
            daemon and ends with its job.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            if not finish:
                self._backlog.clear()
            for thread in self._idle:
                thread.gate.release()
            self._idle.clear()
            threads = self._threads - {threading.current_thread()}
            if self._backlog and not threads:
                # It waits for the current thread, or for a guest who does not come back.
                self._start_next()
                threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._backlog.clear()
        return not any(thread.is_alive() for thread in threads)

    def _start_next(self) -> None:
        """Has the first of the queued jobs run, beside what runs; the lock is held."""
        self._running += 1
        self._hand_over(self._backlog.popleft())

    def _hand_over(self, job: Job) -> None:
        """Gives ``job`` to an idle thread or to a new one; the lock is held."""
        if self._idle:
            thread = self._idle.pop()
            thread.job = job
            thread.gate.release()
            return
        thread = _PoolThread(self, f"{self._name}-{next(self._numbers)}", job)
        try:
            if len(self._threads) >= MAX_THREADS:
                raise RuntimeError(f"there are {MAX_THREADS} threads already")
            self._threads.add(thread)
            thread.start()
        except RuntimeError:
            # The system has no more threads for us: the job waits until one is free.
            self._threads.discard(thread)
            self._running -= 1
            self._backlog.appendleft(job)
            logger.exception("Can't start another thread for %s; a call waits", self._name)

    def _run(self, thread: _PoolThread) -> None:
        """The life of one thread."""
        _thread.pool = self
        job = thread.job
        while job is not None:
            self._do(job)
            thread.job = job = None  # what a job refers to must not live on in here
            job = self._next_job(thread)

    def _do(self, job: Job) -> None:
        self._begun += 1  # only compared for change: a lost increment does no harm
        begin = time.perf_counter()
        try:
            job()
        except BaseException:
            logger.exception("A job of %s failed; its thread goes on", self._name)
        took = min(time.perf_counter() - begin, _LONGEST_COUNTED)
        self._usual_time += (took - self._usual_time) * _WEIGHT_OF_LAST

    def _next_job(self, thread: _PoolThread) -> Job | None:
        """The thread's next job, waited for; None where the thread is to end."""
        with self._lock:
            # More threads run than may where some came back from a wait: this one gives way.
            # At the end one finishes all, whoever else is still at work.
            if self._backlog and (self._running <= self._size or self._closed):
                return self._backlog.popleft()
            self._running -= 1
            if self._closed or len(self._idle) >= self._size:
                self._threads.discard(thread)
                return None
            self._idle.append(thread)
        thread.gate.acquire()  # until _hand_over or close
        if thread.job is None:
            with self._lock:
                self._threads.discard(thread)
        return thread.job

    def _block(self) -> None:
        """The current thread is about to wait: another may run in its place."""
        with self._lock:
            self._running -= 1
            if self._backlog and self._running < self._size:
                self._start_next()

    def _unblock(self) -> None:
        with self._lock:
            self._running += 1


class _PoolThread(ContextThread):
    """One thread of a pool, with the job it is to do next and the gate it idles at."""

    def __init__(self, pool: WorkerPool, name: str, job: Job) -> None:
        super().__init__(pool._context, name, pool._run, (self,))
        self.job: Job | None = job
        self.gate = threading.Lock()
        self.gate.acquire()


def _cpu_time(ident: int) -> float | None:
    """The processor time that a thread has used, in seconds.

    None where the system doesn't tell (then a thread that holds up the queue always counts
    as waiting) or where the thread has ended.
    """
    if sys.platform != "linux" or ident not in sys._current_frames():
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:
        return None


def in_handler() -> bool:
    """Whether the current thread runs a job of a pool."""
    return getattr(_thread, "pool", None) is not None


def in_pool(pool: WorkerPool) -> bool:
    """Whether the current thread is one of this pool's."""
    return getattr(_thread, "pool", None) is pool
