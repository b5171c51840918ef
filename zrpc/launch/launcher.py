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
from .errors import LaunchError
from .escalation import Escalation, Step
from .method import make_starter
from .output import Output
from .port import ReservedPort
from .signals import SignalInbox
from .starter import DEFAULT_PRELOAD, Starter
from .task import Task
from .worker import Worker, base_environment, check_name_prefix, worker_environment

TIMED_OUT = 124  # as coreutils' timeout
_INTERRUPTED = 128 + signal.SIGINT
_NOBODY_READS = 128 + 13  # as a program that SIGPIPE killed
_ECHO = 0.3  # seconds in which a second signal is the first one's echo from a parent process
_KILLED = 10.0  # seconds for killed workers to vanish
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
        check_name_prefix(self.name_prefix)
        if not self.module and not os.path.exists(self.target):
            raise FileNotFoundError(f"there is no script {self.target!r} in {os.getcwd()}")


def launch(job: Job) -> int:
    """Run a job's workers on this machine until all have ended.

    Output goes to this process's descriptors 1 and 2, each line after its worker's rank.
    Worker 0 reads this process's standard input, the others have none. In the main thread,
    SIGINT, SIGTERM and SIGHUP stop the workers: first gently, after the grace period by force,
    and at once when a signal comes again.

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
        port = stack.enter_context(ReservedPort())
        run = _Run(job, starter, inbox, console)
        run.start(base, output, port)
        code = run.watch()
        starter.close()
        output.drain(_STRAY, give_up=lambda: bool(inbox.take()))
        run.report(output)
    return code


class _Run:
    """The workers of one launch. One thread."""

    def __init__(self, job: Job, starter: Starter, inbox: SignalInbox, console: Console) -> None:
        self._job = job
        self._starter = starter
        self._inbox = inbox
        self._console = console
        self._workers: dict[int, Worker] = {}
        self._failed: Worker | None = None
        self._code = 0
        self._stop: Escalation | None = None
        self._deadline = float("inf")
        self._give_up = float("inf")

    def start(self, base: Mapping[str, str], output: Output, port: ReservedPort) -> None:
        """Start all workers, with a port for their rendezvous."""
        job = self._job
        make = Task.module if job.module else Task.script
        program = make(job.target, job.argv)
        runtime_dir = self._starter.make_directory()
        port.workers_start()
        for rank in range(job.nprocs):
            env = worker_environment(
                base,
                rank,
                job.nprocs,
                prefix=job.name_prefix,
                port=port.number,
                runtime_dir=runtime_dir,
            )
            task = program.within(cwd=os.getcwd(), env=env, line_buffered=True)
            self._start_worker(rank, task, output)
        if job.timeout is not None:
            self._deadline = time.monotonic() + job.timeout

    def _start_worker(self, rank: int, task: Task, output: Output) -> None:
        stdout, stderr = output.open(rank)
        stdin = 0 if rank == 0 and _is_open(0) else None
        try:
            pid = self._starter.spawn(task, stdin=stdin, stdout=stdout, stderr=stderr)
        finally:
            os.close(stdout)
            os.close(stderr)
        self._workers[pid] = Worker(rank, pid)

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
        return None if at == float("inf") else max(0.0, at - now)

    def _on_exits(self) -> None:
        for ended in self._starter.exits():
            worker = self._workers[ended.pid]
            worker.returncode = ended.returncode
            if ended.returncode != 0 and self._stop is None:
                self._failed = worker
                text = f"rank {worker.rank} failed ({worker.end()})"
                self._begin_stop(worker.exit_code, text, escalation.terminate(self._job.grace))

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


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
