"""Starting N workers, watching them, and stopping them together."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from . import escalation
from .console import Console
from .descriptors import open_standard_descriptors
from .errors import LaunchError
from .escalation import Escalation, Step
from .method import make_starter
from .output import Output
from .port import ReservedPort
from .signals import SignalInbox
from .starter import DEFAULT_PRELOAD, Starter
from .store import Place, StoreProcess, parse_place
from .task import Task
from .worker import (
    SECRET,
    SECRET_FILE,
    Surroundings,
    Worker,
    base_environment,
    check_name_prefix,
)

TIMED_OUT = 124  # as coreutils' timeout
_INTERRUPTED = 128 + signal.SIGINT
_NOBODY_READS = 128 + 13  # as a program that SIGPIPE killed
_ECHO = 0.3  # seconds in which a second signal is the first one's echo from a parent process
_KILLED = 10.0  # seconds for killed workers to vanish
_LONGEST_WAIT = 86400.0  # seconds at once: the system has a limit, of some weeks
_STRAY = 2.0  # seconds for output of processes that outlived everything


@dataclass(frozen=True)
class Job:
    """What to launch.

    Attributes:
        target: Path of the script, or name of the module.
        argv: The script's own arguments.
        nprocs: How many workers.
        module: Whether `target` is a module, as after ``python -m``.
        name_prefix: Worker names are this and the rank.
        env: Variables for all workers, on top of this process's.
        log_dir: Where each worker's output is kept too; None for nowhere.
        timeout: Seconds, from the start of the workers, after which they are stopped.
        grace: Seconds between a gentle request to stop and force.
        start_method: ``fork`` or ``spawn``; None for what suits the system.
        preload: Modules to import once, before the workers are forked.
        max_restarts: How often each worker is started again where it fails.
        elastic: Whether workers may join and leave, so that there is no world size.
        listen: ``HOST:PORT`` where the workers of an elastic mesh meet; None for a free port
            that only this machine reaches.
        join: ``HOST:PORT`` of an elastic mesh that runs, to which the workers are added.
    """

    target: str
    argv: Sequence[str] = ()
    nprocs: int = 1
    module: bool = False
    name_prefix: str = "worker"
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: str | os.PathLike[str] | None = None
    timeout: float | None = None
    grace: float = 3.0
    start_method: str | None = None
    preload: Sequence[str] = DEFAULT_PRELOAD
    max_restarts: int = 0
    elastic: bool = False
    listen: str | None = None
    join: str | None = None

    def check(self) -> None:
        """Refuse what can't be launched.

        Raises:
            ValueError: A value is out of its range.
            FileNotFoundError: There is no such script.
        """
        if self.nprocs < 1:
            raise ValueError(f"expected at least 1 worker, but got nprocs={self.nprocs}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"expected a timeout above 0 seconds, but got {self.timeout}")
        if self.max_restarts < 0:
            raise ValueError(f"expected 0 or more restarts, but got {self.max_restarts}")
        self._check_place()
        check_name_prefix(self.name_prefix)
        if not self.module and not os.path.exists(self.target):
            raise FileNotFoundError(f"there is no script {self.target!r} in {os.getcwd()}")

    def _check_place(self) -> None:
        if (self.listen or self.join) and not self.elastic:
            raise ValueError("only workers of an elastic mesh can listen somewhere or join others")
        if self.listen and self.join:
            raise ValueError("workers that join a mesh meet where it does: nobody can listen too")
        if place := self.listen or self.join:
            parse_place(place)
        env = {**os.environ, **self.env}
        if self.join and not (env.get(SECRET) or env.get(SECRET_FILE)):
            raise ValueError(
                f"workers that join a mesh need its secret: set {SECRET_FILE} for both launches; "
                "`zrpc secret FILE` makes a file for it"
            )

    @property
    def keeps_store(self) -> bool:
        """Whether the store is hosted beside the workers, any of whom may end."""
        return self.elastic or self.max_restarts > 0


def launch(job: Job) -> int:
    """Run a job's workers on this machine until all have ended.

    Output goes to this process's descriptors 1 and 2, each line after its worker's rank.
    Worker 0 reads this process's standard input, the others have none. Those of the three that are
    closed are opened first, on the null device. In the main thread, SIGINT, SIGTERM and SIGHUP
    stop the workers: first gently, after the grace period by force, and at once when a signal
    comes again.

    Args:
        job: What to run.

    Returns:
        0 if all workers ended with 0; the code of the first one that failed (128 and the number
        for a signal); 124 after the timeout; 128 and the number after a signal to this process.

    Raises:
        ValueError: See `Job.check`.
        FileNotFoundError: There is no such script.
        LaunchError: Workers couldn't be started or watched. None is left running.

    Example:
        >>> launch(Job("train.py", ["--epochs", "3"], nprocs=4))  # doctest: +SKIP
        0
    """
    job.check()
    open_standard_descriptors()
    base = base_environment(job.nprocs, job.env)
    inbox = SignalInbox()
    console = Console(on_closed=inbox.wake)
    output = Output(console, None if job.log_dir is None else Path(job.log_dir))
    starter = make_starter(job.start_method, preload=job.preload, env=base)
    with ExitStack() as stack:
        stack.callback(inbox.close)
        stack.callback(starter.close)
        try:
            starter.start()
        except KeyboardInterrupt:  # while torch was imported: there is nothing to stop yet
            return _INTERRUPTED
        stack.enter_context(inbox)
        run = _Run(job, starter, inbox, console, base, output)
        if named := job.listen or job.join:
            place = parse_place(named)
        else:
            port = stack.enter_context(ReservedPort())
            port.workers_start()
            place = Place(port=port.number)
        run.start(place)
        code = run.watch()
        starter.close()
        output.drain(_STRAY, give_up=lambda: bool(inbox.take()))
        run.report(output)
    return code


class _Run:
    """The workers of one launch. One thread."""

    def __init__(
        self,
        job: Job,
        starter: Starter,
        inbox: SignalInbox,
        console: Console,
        base: Mapping[str, str],
        output: Output,
    ) -> None:
        self._job = job
        self._base = base
        self._output = output
        self._store: StoreProcess | None = None
        self._starter = starter
        self._inbox = inbox
        self._console = console
        self._workers: dict[int, Worker] = {}
        self._failed: Worker | None = None
        self._code = 0
        self._stop: Escalation | None = None
        self._deadline = float("inf")
        self._give_up = float("inf")

    def start(self, place: Place) -> None:
        """Start all workers, which meet at this place, and the store there where it is ours."""
        job = self._job
        first = 0
        if job.keeps_store:
            self._store = StoreProcess(self._starter, self._base, hosts=not job.join)
            found = self._store.first_rank(place, job.nprocs, self._inbox)
            if found is None:
                return  # a signal came: `watch` sees to it
            first = found
        if job.elastic and not job.join:
            self._console.notice(f"zrpc launch: the mesh can be joined at {place}")
        self._surroundings = Surroundings(
            job.nprocs,
            job.name_prefix,
            place.host,
            place.port,
            # Workers of other launches have to find the sockets of these.
            None if job.elastic else self._starter.make_directory(),
            first,
            job.elastic,
            job.max_restarts,
        )
        for rank in range(first, first + job.nprocs):
            self._start_worker(rank)
        if job.timeout is not None:
            self._deadline = time.monotonic() + job.timeout

    def _start_worker(self, rank: int, restarts: int = 0) -> None:
        job, surroundings = self._job, self._surroundings
        make = Task.module if job.module else Task.script
        env = surroundings.environment(self._base, rank, restarts)
        task = make(job.target, job.argv).within(cwd=os.getcwd(), env=env, line_buffered=True)
        stdout, stderr = self._output.open(rank)
        reads = rank == surroundings.first_rank and not restarts
        try:
            pid = self._starter.spawn(
                task, stdin=0 if reads else None, stdout=stdout, stderr=stderr
            )
        finally:
            os.close(stdout)
            os.close(stderr)
        self._workers[pid] = Worker(rank, pid, restarts)

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.returncode is None]

    def watch(self) -> int:
        """Wait for all workers to end, and stop them where that is due.

        Returns:
            The exit code of the launch.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._starter, selectors.EVENT_READ)
            selector.register(self._inbox, selectors.EVENT_READ)
            self._on_wakeup()  # a signal may have come before there were workers
            while alive := self._alive():
                now = time.monotonic()
                if now >= self._give_up:
                    ranks = [worker.rank for worker in alive]
                    raise LaunchError(f"ranks {ranks} still run {_KILLED:g} s after SIGKILL")
                selector.select(self._next_wakeup(now))
                self._on_exits()
                self._on_wakeup()
                self._on_time(time.monotonic())
        return self._code

    def _next_wakeup(self, now: float) -> float | None:
        at = min(
            self._deadline, self._give_up, self._stop.next_at if self._stop else self._deadline
        )
        return None if at == float("inf") else min(max(0.0, at - now), _LONGEST_WAIT)

    def _on_exits(self) -> None:
        for ended in self._starter.exits():
            if self._store is not None and ended.pid == self._store.pid:
                self._on_store_end(self._store)
                continue
            worker = self._workers[ended.pid]
            worker.returncode = ended.returncode
            if ended.returncode != 0 and self._stop is None:
                self._on_failure(worker)

    def _on_failure(self, worker: Worker) -> None:
        text = f"rank {worker.rank} failed ({worker.end()})"
        if worker.restarts < self._job.max_restarts:
            count = f"restart {worker.restarts + 1} of {self._job.max_restarts}"
            self._console.notice(f"zrpc launch: {text}; starting it again ({count})")
            self._start_worker(worker.rank, worker.restarts + 1)
            return
        self._failed = worker
        self._begin_stop(worker.exit_code, text, escalation.terminate(self._job.grace))

    def _on_store_end(self, store: StoreProcess) -> None:
        if store.hosts and self._stop is None:
            steps = escalation.terminate(self._job.grace)
            self._begin_stop(1, "the store of the workers has ended", steps)

    def _on_wakeup(self) -> None:
        signals = self._inbox.take()
        now = time.monotonic()
        if self._console.closed and self._stop is None:
            steps = escalation.terminate(self._job.grace)
            self._begin_stop(_NOBODY_READS, "nobody reads the output any more", steps)
        elif not signals:
            return
        elif self._stop is None:
            number = min(signals)
            gentle = escalation.interrupt if number == signal.SIGINT else escalation.terminate
            text = f"got {signal.Signals(number).name}"
            self._begin_stop(128 + number, text, gentle(self._job.grace))
        elif now - self._stop.began > _ECHO:
            self._stop = Escalation(escalation.kill(), now)

    def _begin_stop(self, code: int, why: str, steps: list[Step]) -> None:
        self._code = code
        self._stop = Escalation(steps, time.monotonic())
        self._deadline = float("inf")
        if alive := len(self._alive()):
            workers = "worker" if alive == 1 else "workers"
            self._console.notice(f"zrpc launch: {why}; stopping {alive} {workers}")

    def _on_time(self, now: float) -> None:
        if now >= self._deadline:
            steps = escalation.terminate(self._job.grace)
            self._begin_stop(TIMED_OUT, f"timed out after {self._job.timeout:g} s", steps)
        for step in self._stop.due(now) if self._stop else ():
            for worker in self._alive():
                self._starter.send_signal(worker.pid, step.number, group=step.group)
            if self._stop is not None and self._stop.next_at == float("inf"):
                self._give_up = now + _KILLED

    def report(self, output: Output) -> None:
        """Show the last words of the worker that failed first, below everything else."""
        worker = self._failed
        if worker is None:
            return
        words = output.last_words(worker.rank)
        tail = "its standard error ends with:" if words else "it wrote nothing to standard error"
        heading = f"rank {worker.rank} (pid {worker.pid}) failed first, with {worker.end()}; {tail}"
        self._console.notice(f"\nzrpc launch: {heading}")
        self._console.raw(words)
