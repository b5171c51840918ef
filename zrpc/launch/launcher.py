"""Starts N workers, watches them, and stops them together."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from zrpc.launch import escalation
from zrpc.launch.errors import LaunchError
from zrpc.launch.escalation import KILL_SECONDS, Escalation, Step
from zrpc.launch.output import Console, Output
from zrpc.launch.port import ReservedPort
from zrpc.launch.script import check_script, find_program
from zrpc.launch.signals import (
    FORWARDED,
    STOPS,
    SUSPENDS,
    SignalInbox,
    SignalState,
    let_act,
    receive_signals,
)
from zrpc.launch.starter import DEFAULT_PRELOAD, Starter, start_method
from zrpc.launch.store import StoreAddress, parse_address, reserve_ranks
from zrpc.launch.task import Task
from zrpc.launch.terminal import Terminal, is_in_foreground, is_usable
from zrpc.launch.terminal_input import Keyboard, open_keyboard
from zrpc.launch.worker import (
    ENDED_NOTE,
    SECRET,
    SECRET_FILE,
    STOP_NOTE,
    EnvironmentTemplate,
    Roles,
    Worker,
    base_environment,
)

_TIMED_OUT_CODE = 124  # the same as coreutils' timeout
_OUTPUT_CLOSED_CODE = 128 + 13  # the same as a program killed by SIGPIPE
_ECHO_SECONDS = 0.3  # within this time a second signal is the first one, repeated by a parent
_MAX_SELECT_SECONDS = 86400.0  # the system has a limit of some weeks
_DRAIN_SECONDS = 2.0  # for a process that outlived all workers and writes all the time
_WAITING = "zrpc launch: a worker reads the terminal; it waits until you continue this by fg"
_Steps = Callable[[float], list[Step]]  # makes them from the grace period


@dataclass(frozen=True)
class Job:
    """What to launch.

    Attributes:
        target: Path of the script, or name of the module or the program.
        argv: The script's own arguments.
        nprocs: The number of workers.
        module: Whether `target` is a module, as after ``python -m``.
        no_python: Whether `target` is a program that isn't run by Python, such as a shell script.
        name_prefix: A worker's name is this prefix and its rank.
        roles: The number of workers of each role, which name them instead; empty for no roles.
        env: Variables for all workers, in addition to this process's.
        log_dir: The directory in which each worker's output is also kept; None to keep none.
        timeout: Seconds, from the start of the workers, after which they are stopped.
        grace: Seconds from the first signal that asks workers to stop until they are killed.
        start_method: ``fork`` or ``spawn``; None for the system's default.
        preload: Modules to import once, before the workers are forked.
        max_restarts: How often each worker is started again if it fails.
        elastic: Whether workers may join and leave, so that there is no world size.
        listen: ``HOST:PORT`` where the workers of an elastic mesh meet; None for a free port
            that only this machine can reach.
        join: ``HOST:PORT`` of a running elastic mesh, to which the workers are added.
        on_error: ``module:function``, which a worker calls with an error that ends its program,
            after the traceback; empty for none.
    """

    target: str
    argv: Sequence[str] = ()
    nprocs: int = 1
    module: bool = False
    no_python: bool = False
    name_prefix: str = "worker"
    roles: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: str | os.PathLike[str] | None = None
    timeout: float | None = None
    grace: float = 30.0
    start_method: str | None = None
    preload: Sequence[str] = DEFAULT_PRELOAD
    max_restarts: int = 0
    elastic: bool = False
    listen: str | None = None
    join: str | None = None
    on_error: str = ""

    def check(self) -> None:
        """Checks that the job can be launched.

        Raises:
            ValueError: A value is out of its range, or the script is no Python script.
            FileNotFoundError: There is no such script or program.
        """
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"expected a timeout above 0 seconds, but got {self.timeout}")
        if not 0 <= self.grace < math.inf:
            raise ValueError(f"expected a grace period of 0 or more seconds, but got {self.grace}")
        if self.max_restarts < 0:
            raise ValueError(f"expected 0 or more restarts, but got {self.max_restarts}")
        self._check_address()
        if self.roles and self.elastic:
            raise ValueError(
                "--role names workers by their number, and is for a mesh of a fixed size. In an "
                "elastic mesh, launch the workers of each role by themselves, with --name-prefix"
            )
        if self.roles and len(Roles.of(self.roles)) != self.nprocs:
            raise ValueError(
                f"expected as many workers as the roles have, which is {len(Roles.of(self.roles))}"
                f", but got nprocs={self.nprocs}: leave it out"
            )
        if self.nprocs < 1:  # after the roles: one without workers is named
            raise ValueError(f"expected at least 1 worker, but got nprocs={self.nprocs}")
        if not re.fullmatch(r"[A-Za-z0-9_:-]{0,120}", self.name_prefix):
            raise ValueError(
                "expected a name prefix of at most 120 letters, digits, '-', '_' and ':', but got "
                f"{self.name_prefix!r}"
            )
        if self.module and self.no_python:
            raise ValueError("expected -m or --no-python, but got both: a module is run by Python")
        if self.no_python:
            find_program(self.target, {**os.environ, **self.env}.get("PATH"))
        elif not self.module:
            check_script(self.target)

    def _check_address(self) -> None:
        if (self.listen or self.join) and not self.elastic:
            raise ValueError("--listen and --join are for an elastic mesh: add --elastic")
        if self.listen and self.join:
            raise ValueError("expected --listen or --join, but got both: a mesh has one address")
        if address := self.listen or self.join:
            parse_address(address)
        if self.join and not self.has_secret:
            raise ValueError(
                f"workers that join a mesh need its secret: set {SECRET_FILE} for both launches; "
                "`zrpc secret FILE` creates that file"
            )

    @property
    def has_secret(self) -> bool:
        """Whether the environment has the secret of the mesh, which other launches need as well."""
        env = {**os.environ, **self.env}
        return bool(env.get(SECRET) or env.get(SECRET_FILE))

    @property
    def keeps_store(self) -> bool:
        """Whether the store has a process of its own, so that any worker may exit."""
        return self.elastic or self.max_restarts > 0


def launch(job: Job) -> int:
    """Runs a job's workers on this machine until all have exited. For the main thread.

    Output goes to this process's descriptors 1 and 2, each line after its worker's rank.
    Worker 0 reads this process's standard input, the others have none. SIGINT, SIGTERM, SIGHUP and
    SIGALRM stop the workers: first gently, after the grace period by force, and at once when a
    second signal arrives. SIGUSR1, SIGUSR2, SIGCONT and SIGWINCH are passed on to the workers. None
    of these stays blocked here, and SIGCHLD is not ignored.

    Returns:
        0 if all workers exited with 0; the code of the first one that failed (128 plus the number
        for a signal); 124 after the timeout; 128 plus the number after a signal to this process;
        141 if the output was closed.

    Raises:
        ValueError: See `Job.check`.
        FileNotFoundError: There is no such script.
        LaunchError: Workers couldn't be started or watched. None is left running.

    Example:
        >>> launch(Job("train.py", ["--epochs", "3"], nprocs=4))  # doctest: +SKIP
        0
    """
    job.check()
    with ExitStack() as stack:
        given = SignalState.current()
        inbox = stack.enter_context(SignalInbox(STOPS | FORWARDED))
        receive_signals()
        base = base_environment(job.nprocs, job.env)
        if job.no_python:
            base.setdefault("PYTHONUNBUFFERED", "1")  # a Python that it starts writes to a pipe
        names = [member.name for member in Roles.of(job.roles)]
        console = Console(on_closed=inbox.wake, labels=names)
        output = Output(console, None if job.log_dir is None else Path(job.log_dir))
        starter = Starter(
            start_method(job.start_method),
            preload=() if job.no_python else job.preload,
            env=base,
            given=given,
            spare_detached=True,
        )
        stack.callback(starter.close)
        try:
            with inbox.interrupting(STOPS):
                starter.start()
        except (KeyboardInterrupt, LaunchError):  # while torch was imported, perhaps by all
            if stops := inbox.take() & STOPS:  # there is nothing to stop yet
                return 128 + min(stops)
            raise
        if starter.note:
            output.notice(f"zrpc launch: note: {starter.note}")
        terminal = None
        if is_usable():
            terminal = stack.enter_context(Terminal(starter.make_directory()))
            base = {**base, **terminal.env}
        keyboard = open_keyboard(
            lambda: terminal is not None and terminal.is_busy(), lambda: output.notice(_WAITING)
        )
        stack.callback(keyboard.close)
        run = _Run(job, starter, inbox, console, base, output, keyboard)
        if text := job.listen or job.join:
            address = parse_address(text)
        else:
            port = stack.enter_context(ReservedPort())
            address = StoreAddress(port=port.number)
        run.start(address)
        code = run.watch()
        starter.close()
        output.drain(_DRAIN_SECONDS, cancelled=lambda: inbox.has(STOPS))
        run.report()
    return code


@dataclass(eq=False)
class _Run:
    """State of one launch. Not thread-safe."""

    _job: Job
    _starter: Starter
    _inbox: SignalInbox
    _console: Console
    _base: Mapping[str, str]
    _output: Output
    _keyboard: Keyboard
    _workers: dict[int, Worker] = field(default_factory=dict)
    _first_failed: Worker | None = None
    _exit_code: int = 0
    _escalation: Escalation | None = None
    _stop_reason: str = ""
    _runtime_dir: str | None = None  # private to the workers of this launch
    _deadline: float = math.inf  # of the job's timeout

    def start(self, address: StoreAddress) -> None:
        """Starts all workers, which meet at this address, and before them a store if needed."""
        job = self._job
        first = 0
        if job.keeps_store:
            found = reserve_ranks(
                self._starter, self._base, address, job.nprocs, not job.join, self._inbox
            )
            if found is None:
                return  # a signal came, which `watch` handles
            first = found
        if job.elastic and not job.join:
            place = f"the mesh can be joined at {address}"
            if not job.has_secret:
                place = f"the mesh is at {address}; to join it, set {SECRET_FILE} for both launches"
            self._output.notice(f"zrpc launch: {place}")
        # Workers of other launches must find the sockets of these.
        self._runtime_dir = None if job.elastic else self._starter.make_directory()
        self._environment = EnvironmentTemplate(
            job.nprocs,
            job.name_prefix,
            address.host,
            address.port,
            self._runtime_dir,
            first,
            job.elastic,
            job.max_restarts,
            Roles.of(job.roles),
        )
        self._inbox.discard(FORWARDED)  # no program could have had a handler for them
        self._inbox.collect(SUSPENDS)  # before a worker could run on without this process
        for rank in range(first, first + job.nprocs):
            self._start_worker(rank)
        if job.timeout is not None:
            self._deadline = time.monotonic() + job.timeout

    def _start_worker(self, rank: int, restarts: int = 0) -> None:
        job, template = self._job, self._environment
        make = Task.module if job.module else Task.program if job.no_python else Task.script
        env = template.for_worker(self._base, rank, restarts)
        reads_input = rank == template.first_rank and not restarts
        task = make(job.target, job.argv).within(
            cwd=os.getcwd(),
            env=env,
            line_buffered=True,
            on_error=job.on_error,
            relayed_input=reads_input and self._keyboard.relays,
        )
        stdin = self._keyboard.fd if reads_input else None
        with self._output.open(rank, restarts) as (stdout, stderr):
            pid = self._starter.spawn(task, stdin=stdin, stdout=stdout, stderr=stderr)
        self._workers[pid] = Worker(rank, pid, restarts)
        if reads_input:
            self._keyboard.serve(pid)

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.returncode is None]

    def watch(self) -> int:
        """Waits for all workers to exit, and stops them on failure, timeout or signal.

        Returns the exit code of the launch.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._starter, selectors.EVENT_READ)
            selector.register(self._inbox, selectors.EVENT_READ)
            self._on_wakeup()  # a signal may have come before there were workers
            while self._alive():
                selector.select(self._seconds_to_wait())
                self._on_exits()
                self._on_wakeup()
                self._on_time(time.monotonic())
        return self._exit_code

    def _seconds_to_wait(self) -> float:
        at = self._escalation.next_at if self._escalation else self._deadline
        return min(max(0.0, at - time.monotonic()), _MAX_SELECT_SECONDS)

    def _on_exits(self) -> None:
        for found in self._starter.exits():
            # A worker that is started later may get the process id of one that has exited.
            worker = self._workers.get(found.pid)
            if worker is None:  # the process that hosts the store, or asks one for ranks
                if not self._job.join and self._escalation is None:
                    self._begin_stop(1, "the workers' store has exited")
                continue
            worker.returncode = found.returncode
            self._keyboard.on_exit(found.pid)
            if found.returncode == 0:
                ended = [each.rank for each in self._workers.values() if each.returncode == 0]
                self._note(ENDED_NOTE, " ".join(map(str, ended)))
            elif self._escalation is None:
                self._on_failure(worker)

    def _on_failure(self, worker: Worker) -> None:
        text = f"rank {worker.rank} failed ({worker.describe_end()})"
        if worker.restarts < self._job.max_restarts:
            count = f"restart {worker.restarts + 1} of {self._job.max_restarts}"
            self._output.notice(f"zrpc launch: {text}; starting it again ({count})")
            self._start_worker(worker.rank, worker.restarts + 1)
            return
        self._first_failed = worker
        self._begin_stop(worker.exit_code, text)

    def _on_wakeup(self) -> None:
        signals = self._inbox.take()
        if signals & FORWARDED:
            self._keyboard.resize()  # before a worker learns that it has another size
        for number in signals & FORWARDED:
            self._send(number, group=False)
        if suspends := signals & SUSPENDS:
            self._suspend(min(suspends))
        stops = signals & STOPS
        now = time.monotonic()
        if self._console.trouble and self._escalation is None:
            self._begin_stop(_OUTPUT_CLOSED_CODE, f"the output {self._console.trouble}")
        elif not stops:
            return
        elif self._escalation is None:
            number = min(stops)
            steps = escalation.interrupt if number == signal.SIGINT else escalation.terminate
            self._begin_stop(128 + number, f"got {signal.Signals(number).name}", steps)
        elif now - self._escalation.started_at > _ECHO_SECONDS:
            self._escalation = Escalation(escalation.kill(), now)

    def _send(self, number: int, *, group: bool) -> None:
        for worker in self._alive():
            self._starter.send_signal(worker.pid, number, group=group)

    def _suspend(self, number: int) -> None:
        """Stops the workers and this process, until the shell continues it.

        Ctrl-Z doesn't reach the workers, which have sessions of their own. There SIGTSTP would do
        nothing, as no shell watches them.
        """
        if number != signal.SIGTSTP and is_in_foreground():
            return  # a thread has tried the terminal before the launcher was continued there
        before = time.monotonic()
        self._send(signal.SIGSTOP, group=True)
        self._keyboard.pause()
        let_act(number)
        self._keyboard.resume()
        self._inbox.discard(SUSPENDS | {signal.SIGCONT})
        self._inbox.wake()  # for signals that came meanwhile
        self._send(signal.SIGCONT, group=True)
        seconds = time.monotonic() - before
        self._deadline += seconds
        if self._escalation is not None:
            self._escalation.postpone(seconds)

    def _begin_stop(self, code: int, reason: str, steps: _Steps = escalation.terminate) -> None:
        self._exit_code = code
        self._escalation = Escalation(steps(self._job.grace), time.monotonic())
        self._stop_reason = reason
        if alive := len(self._alive()):
            workers = "worker" if alive == 1 else "workers"
            self._output.notice(f"zrpc launch: {reason}; stopping {alive} {workers}")

    def _on_time(self, now: float) -> None:
        if self._escalation is None:
            if now < self._deadline:
                return
            self._begin_stop(_TIMED_OUT_CODE, f"timed out after {self._job.timeout:g} s")
        assert self._escalation is not None
        for step in self._escalation.due(now):
            if step.number == 0 and (alive := self._alive()):
                ranks = [worker.rank for worker in alive]
                raise LaunchError(f"{KILL_SECONDS:g} s after SIGKILL, ranks {ranks} still run")
            self._send(step.number, group=step.group)
            self._note(STOP_NOTE, self._stop_reason)

    def _note(self, name: str, text: str) -> None:
        """Tells workers that handle the signals, or wait to meet others, that they wait in vain."""
        if self._runtime_dir is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep them from being stopped
                Path(self._runtime_dir, name).write_text(text)

    def report(self) -> None:
        """Shows the error output of the worker that failed first, below everything else."""
        worker = self._first_failed
        if worker is None:
            return
        lines = self._output.error_tail(worker.rank)
        tail = "its standard error ends with:" if lines else "it wrote nothing to standard error"
        head = f"rank {worker.rank} (pid {worker.pid}) failed first, with {worker.describe_end()}"
        self._console.notice(b"", f"zrpc launch: {head}; {tail}".encode(), *lines)
