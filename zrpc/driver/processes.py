"""The processes of a driver's workers: started, watched and stopped by the driver's own process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType

from zrpc.agent.agent import Agent
from zrpc.driver.console import StreamConsole
from zrpc.driver.edited import tell_of_edits
from zrpc.driver.place import MeetingPlace
from zrpc.errors import RpcError
from zrpc.launch import LaunchError, Starter, Task
from zrpc.launch.line_splitter import LineBudget, LineSplitter, ThrottledSplitter
from zrpc.launch.output import Output
from zrpc.launch.port import ReservedPort
from zrpc.launch.signals import let_act
from zrpc.launch.starter import start_method
from zrpc.launch.worker import STOP_NOTE, EnvironmentTemplate, Roles, Worker, base_environment
from zrpc.membership.secret import new_secret
from zrpc.options import ZmqRpcBackendOptions
from zrpc.wire.pickling import dumps

# For workers that have left the mesh to exit, and for what they have printed to be shown.
_EXIT_SECONDS = 5.0
_HURRIED_EXIT_SECONDS = 1.0
_DRAIN_SECONDS = 2.0
# For killed workers to be dead.
_KILL_SECONDS = 5.0
# What a notebook gets in a second of all workers, from their standard outputs and errors.
_MAX_LINES = 1000
_MAX_BYTES = 400_000
_LONG_SECONDS = 86400.0  # a wait that an exit ends


class WorkerProcesses:
    """Starts one process for each worker, and reports those that exit before the mesh is closed.

    A fork server of their own starts them. It kills them, and all that they have started, when
    this process ends in any way. Each has a session of its own, so that no Ctrl-C reaches it.

    Args:
        roles: the workers, by rank.
        env: variables for them, in addition to this process's.
        max_restarts: how often each is started again.

    Attributes:
        directory: private to this mesh, for sockets and the store; it is removed at the end.
        closing: whether the workers are expected to exit; then only failures are reported.
    """

    def __init__(self, roles: Roles, env: Mapping[str, str], max_restarts: int) -> None:
        self._roles = roles
        self._max_restarts = max_restarts
        # As they are now, also for workers that are started again.
        self._cwd = os.getcwd()
        self._sys_path = [os.path.abspath(entry) for entry in sys.path]
        # Workers have no terminal, so `breakpoint()` waits for `zrpc debug`.
        hook = os.environ.get("PYTHONBREAKPOINT", "zrpc.breakpoint")
        self._base = base_environment(len(roles), {"PYTHONBREAKPOINT": hook, **env})
        self._starter = Starter(start_method(), env=self._base)
        names = [member.name for member in roles]
        self._output = Output(StreamConsole(labels=names), make_splitter=_splitter_for(len(roles)))
        self._port = ReservedPort()  # for process groups of the workers
        # Of the present processes, by process id. The thread alone changes it once it runs.
        self._workers: dict[int, Worker] = {}
        self._agent: Agent | None = None  # the driver's, once all have joined
        self.closing = self._killing = False
        self._end_reports: Callable[[], None] = _nothing
        self._suspension = Suspension(self._send)
        self._thread = threading.Thread(target=self._watch, name="zrpc-driver", daemon=True)

    @property
    def pids(self) -> Mapping[str, int]:
        """The process ids of the workers that run, by name."""
        found = {self._roles[each.rank].name: pid for pid, each in self._workers.copy().items()}
        return MappingProxyType(found)

    def start(self, options: ZmqRpcBackendOptions | None) -> MeetingPlace:
        """Starts all workers; returns the place where they wait for the driver.

        Raises:
            LaunchError: they can't be started; `stop` must be called nevertheless.
        """
        self._starter.start()
        if self._starter.note:
            self._output.notice(f"zrpc: note: {self._starter.note}")
        self.directory = self._starter.make_directory()
        place = MeetingPlace(
            f"file://{self.directory}/store",
            len(self._roles),
            new_secret(),
            options,
            self._max_restarts > 0,
            Path(self.directory),
        )
        self._place = dumps(place)
        self._template = EnvironmentTemplate(
            len(self._roles), "", "127.0.0.1", self._port.number, self.directory, roles=self._roles
        )
        for rank in range(len(self._roles)):
            self._start_worker(rank)
        self._thread.start()
        return place

    def _start_worker(self, rank: int, restarts: int = 0) -> None:
        name = self._roles[rank].name
        task = Task.function("zrpc.driver.place:serve", self._place, name, rank, restarts).within(
            cwd=self._cwd,
            env=self._template.for_worker(self._base, rank, restarts),
            sys_path=self._sys_path,
            line_buffered=True,
        )
        with self._output.open(rank, restarts) as (stdout, stderr):
            pid = self._starter.spawn(task, stdout=stdout, stderr=stderr)
        self._workers[pid] = Worker(rank, pid, restarts)

    def begin_reports(self, agent: Agent) -> None:
        """Reports, or starts again, workers that exit from now on: all have joined the driver."""
        self._agent = agent
        self._end_reports = tell_of_edits(self._output.notice)
        self._suspension.begin()

    def _leave(self) -> bool:
        """Whether the workers leave with the driver."""
        return self.closing or (self._agent is not None and self._agent.closed)

    def _watch(self) -> None:
        """Runs in the thread, until all workers have exited."""
        try:
            while self._workers:
                for found in self._starter.exits(_LONG_SECONDS):
                    worker = self._workers.pop(found.pid)
                    worker.returncode = found.returncode
                    self._on_exit(worker)
        except (LaunchError, OSError) as error:  # Ctrl-C has ended the wait of `stop`, which closes
            self._workers.clear()  # the server has killed them, or they have died with it
            if not self._leave():
                self._output.notice(f"zrpc: all workers are lost: {error}")

    def _on_exit(self, worker: Worker) -> None:
        name = self._roles[worker.rank].name
        what = f"{name} (pid {worker.pid}) has exited: {worker.describe_end('zrpc')}"
        failed, leaves = worker.returncode != 0, self._leave()
        if self._killing or (leaves and not failed):
            return
        if self._agent is None:
            # The others, and the driver, wait to meet it.
            Path(self.directory, STOP_NOTE).write_text(what)
        elif leaves:
            self._output.notice(f"zrpc: {what}")
        elif failed and worker.restarts < self._max_restarts:
            count = f"restart {worker.restarts + 1} of {self._max_restarts}"
            self._output.notice(f"zrpc: {what}; starting it again ({count})")
            try:
                self._start_worker(worker.rank, worker.restarts + 1)
            except (LaunchError, OSError) as error:  # no descriptors are left, for example
                self._output.notice(f"zrpc: {name} can't be started again: {error}")
        else:
            self._output.notice(f"zrpc: {what}; calls to it raise WorkerDied")

    def _send(self, number: int) -> None:
        """Sends a signal to all workers, and to the processes in their groups."""
        for pid in [*self._workers]:
            with contextlib.suppress(LaunchError):
                self._starter.send_signal(pid, number, group=True)

    def stop(self, hurried: bool) -> None:
        """Waits for the workers to exit, kills those that don't soon, and releases everything.

        May be called again if it was interrupted.

        Args:
            hurried: whether they get less time, as they have not left the mesh together.
        """
        self.closing = True
        self._end_reports()
        self._end_reports = _nothing
        self._suspension.end()
        try:
            if self._thread.ident is not None:
                self._thread.join(_HURRIED_EXIT_SECONDS if hurried else _EXIT_SECONDS)
                self._killing = True
                self._send(signal.SIGKILL)
                self._thread.join(_KILL_SECONDS)
        finally:
            self._starter.close()
            self._port.close()
            self._output.drain(_DRAIN_SECONDS)


def _nothing() -> None:
    pass


def _splitter_for(workers: int) -> Callable[[], LineSplitter | ThrottledSplitter]:
    """Returns what makes a splitter for each stream: without limits if this is a plain program.

    A notebook shows some thousand lines a second at most, and stops showing any beyond its limits.
    """
    if sys.stdout is sys.__stdout__:
        return LineSplitter
    # A half is for whichever worker writes. Each stream has its part of the other half, so that a
    # flood of one worker hides no other.
    shared = LineBudget(_MAX_LINES // 2, _MAX_BYTES // 2)
    streams = 2 * workers
    own = max(1, _MAX_LINES // 2 // streams), _MAX_BYTES // 2 // streams
    return partial(ThrottledSplitter, *own, shared)


def check_interpreter() -> None:
    """Checks that this process can start workers, and should.

    Raises:
        RpcError: it is frozen, so that its executable is no interpreter.
        RuntimeError: it is a child that imports the main script.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes and getattr(processes.current_process(), "_inheriting", False):
        raise RuntimeError(
            "zrpc.start_mesh was called again by a process that multiprocessing has started, as "
            'that imported the main script: put the call under `if __name__ == "__main__":`'
        )
    if getattr(sys, "frozen", False):
        raise RpcError(
            "start_mesh starts workers by the interpreter that runs this program, but the program "
            f"is frozen: {sys.executable} is none. Run it with an installed Python"
        )


class Suspension:
    """Stops and continues workers with this process, unless the program handles Ctrl-Z itself.

    `begin` and `end` do nothing outside of the main thread, since no other can handle signals.

    Args:
        send: sends a signal to all workers.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send

    def begin(self) -> None:
        """Handles Ctrl-Z from now on."""
        if _in_main_thread() and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._suspend)

    def end(self) -> None:
        """Gives Ctrl-Z its default effect again."""
        if _in_main_thread() and signal.getsignal(signal.SIGTSTP) == self._suspend:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread; returns when this process is continued."""
        self._send(signal.SIGSTOP)
        let_act(number)
        self._send(signal.SIGCONT)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
