"""A mesh of processes, forked from a server that has already imported torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle

from zrpc.launch import LaunchError
from zrpc.launch.starter import Starter
from zrpc.launch.task import Task
from zrpc.launch.worker import run_secret, without_launcher
from zrpc.runtime.forks import free_in_child
from zrpc.testing.child import INTERRUPT_SIGNAL, STACKS_SIGNAL, WorkerSettings
from zrpc.testing.failure import WorkerExited, attribute
from zrpc.testing.leaks import files_in
from zrpc.testing.procfs import command_of, read_text, session_members, state_of
from zrpc.testing.served import send_request, start_serving
from zrpc.testing.server import server_lock, warm_server
from zrpc.testing.spec import MeshSpec
from zrpc.testing.worker import Work, Worker, name_of
from zrpc.wire.pickling import dumps

# Variables that tell a worker whether it may be restarted, and how often it was.
_MAX_RESTARTS = "ZRPC_MAX_RESTARTS"
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Time for the stacks of a process to appear, for them to stop growing, and for a process to
# react to a signal.
_STACKS_SECONDS = 1.0
_STACKS_SETTLE_SECONDS = 0.05
_SIGNAL_SECONDS = 5.0

# The outermost calls, as faulthandler writes them. They are the same in all stacks.
_OUTERMOST = re.compile(
    r'^  File "(<string>|.*/threading\.py|.*/zrpc/launch/(program|child)\.py)", line \d+ '
    r"in (<module>|become|run|_run_function|_bootstrap|_bootstrap_inner)\n",
    re.MULTILINE,
)

# cloudpickle's list of modules that go by value is global: the lock guards changes to it.
_by_value_lock = free_in_child(threading.Lock())


def process_workers(
    spec: MeshSpec, *, by_value: Iterable[str] = (), capture: bool = False
) -> tuple[list[Worker], Callable[[], list[str]]]:
    """Returns the workers of a mesh of processes; none is started yet.

    Args:
        spec: the specification of the mesh.
        by_value: the modules whose functions are sent by value.
        capture: whether to keep the workers' output; otherwise they share this process's stdout
            and stderr.

    Returns:
        The workers, and a function to call when all are closed. It returns what they left behind.
    """
    server = warm_server()
    # If this process is killed, the server removes the directory.
    home = Path(server.make_directory())
    run = Path(server.make_directory())  # not in the first one: paths of sockets must be short
    secret = run_secret(os.environ)
    shared = _Shared(spec, server, home, run, tuple(by_value), capture, secret)
    workers = [ProcessWorker(name, rank, shared) for rank, name in enumerate(spec.names)]

    def clean_up() -> list[str]:
        # A killed worker can't remove its socket; the next agent will.
        left = [] if any(worker.killed for worker in workers) else files_in(run)
        for directory in (home, run):
            shutil.rmtree(directory, ignore_errors=True)
        return left

    return list(workers), clean_up


@dataclass(frozen=True)
class _Shared:
    """What the workers of a mesh have in common.

    Args:
        spec: the specification of the mesh.
        server: the server that forks the workers.
        home: a directory for the store, and for the workers' output and stacks.
        run: a directory for their sockets.
        by_value: the modules whose functions are sent by value.
        capture: whether to keep the workers' output.
        secret: the variables that hold the mesh's secret.
    """

    spec: MeshSpec
    server: Starter
    home: Path
    run: Path
    by_value: Sequence[str]
    capture: bool
    secret: Mapping[str, str]


class ProcessWorker(Worker):
    """A worker that is a process; see `Worker`.

    Functions are sent to it over a socket pair. A thread of this process waits for the replies,
    and for the exit of the worker's process.
    """

    def __init__(self, name: str, rank: int, shared: _Shared, restarts: int = 0) -> None:
        super().__init__(name, rank)
        self._shared = shared
        self._restarts = restarts
        self._output_path = shared.home / f"{name}.output" if shared.capture else None
        self._settings = WorkerSettings(name, rank, shared.spec, shared.home)
        self._pid: int | None = None
        # A pidfd for signals: unlike a process id, it can't come to mean another process. -1 if
        # there is none. Guarded by self._lock, since it is closed when the process exits.
        self._process = -1
        self._paused = False  # by `pause`: what else has stopped it must show
        self._shown = 0  # how much of the output new_output() has returned
        self._kept_output = ""  # all of the output, after its file was removed
        self._exit: int | None = None
        # Held from entering a future until its request is sent: replies come in that order.
        self._sending = threading.Lock()
        self._requests = 0  # how many were sent; guarded by `_sending`
        self._reader = threading.Thread(
            target=self._read, name=f"zrpc-test-{name}-reader", daemon=True
        )

    @property
    def label(self) -> str:
        """The worker's name and process, for a reader."""
        return f"{self.name} (pid {self._pid})"

    @property
    def pid(self) -> int:
        """The worker's process id.

        Raises:
            RuntimeError: the worker was not started.
        """
        if self._pid is None:
            raise RuntimeError(f"{self.name} has no process: it was not started")
        return self._pid

    def successor(self) -> ProcessWorker:
        """Returns the next incarnation, with the same name and rank; it is not started yet."""
        return ProcessWorker(self.name, self.rank, self._shared, self._restarts + 1)

    def start(self) -> Work[Any]:
        """Forks the process and makes it join the mesh."""
        with self._streams() as streams:
            pid, self._connection = start_serving(self._shared.server, self._task, *streams)
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise WorkerExited(f"{self.name} (pid {pid}) exited as it was started") from None
        self._pid = pid
        self._reader.start()
        return self._request("starts", "start")

    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Work[Any]:
        """Queues ``fn(*args, **kwargs)`` for the main thread of the process."""
        with _pickling_by_value(self._shared.by_value):
            pickled = dumps((fn, args, kwargs))
        return self._request(f"runs {name_of(fn)}", "call", pickled)

    def interrupt(self, work: Work[Any]) -> None:
        """Raises KeyboardInterrupt in the function, there."""
        with self._lock:
            pending = work in self._pending
        if pending:
            with self._settings.interrupts_path.open("a") as file:
                file.write(f"{work.number}\n")
            self._signal(INTERRUPT_SIGNAL)

    def shutdown(self, graceful: bool) -> Work[list[str]]:
        """Makes the worker leave its mesh; its process keeps running."""
        if self._paused:
            self.resume()
        return self._request("shuts down", "shutdown", graceful, self._shared.spec.leaks)

    def ask_for_stacks(self) -> None:
        """Makes the process write its stacks, for `stacks` to read; does not block."""
        self._signal(STACKS_SIGNAL)

    def stacks(self) -> str:
        """Returns the stacks of its threads, innermost call first, within a second."""
        if self._pid is None or self._process == -1:
            return f"none: it {'was not started' if self._pid is None else self._exit_text()}\n"
        deadline = time.monotonic() + _STACKS_SECONDS
        text, size = "", -1
        # faulthandler writes bit by bit, in a signal handler, and doesn't signal the end.
        while time.monotonic() < deadline and (not text or len(text) != size):
            size = len(text)
            time.sleep(_STACKS_SETTLE_SECONDS)
            text = read_text(self._settings.stacks_path)
        return (
            _OUTERMOST.sub("", text)
            or f"none within {_STACKS_SECONDS:g} s; state: {state_of(self._pid)}\n"
        )

    def output(self) -> str:
        """Returns what it has written to stdout and stderr, if that is captured."""
        return self._kept_output or (read_text(self._output_path) if self._output_path else "")

    def new_output(self) -> str:
        """Returns what it has written since the last call, if that is captured."""
        text = self.output()
        new, self._shown = text[self._shown :], len(text)
        return new

    def kill(self, timeout: float) -> None:
        """Kills the process and waits until it is dead, at most ``timeout`` seconds."""
        self.killed = True
        self.abort()
        self._reader.join(timeout)

    def pause(self) -> None:
        """Pauses the process, and waits until it is paused."""
        self._paused = True
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while state_of(self.pid) not in ("T", "Z", "") and time.monotonic() < deadline:
            time.sleep(0.001)  # only its parent, the fork server, could wait for an event

    def resume(self) -> None:
        """Resumes the process."""
        self._paused = False
        self._signal(signal.SIGCONT)

    def abort(self) -> None:
        """Kills the process; does not wait for its death."""
        self._signal(signal.SIGKILL)

    def stop_when_idle(self) -> None:
        """Tells the process to exit after the work submitted so far."""
        if self._pid is not None:
            with self._sending:
                send_request(self._connection, "exit")

    def close(self, timeout: float) -> list[str]:
        """Waits until the process exits, and kills it after ``timeout`` seconds.

        Returns:
            A description of each thing that the worker left behind.
        """
        if self._pid is None:
            return []
        if self._reader.ident is None:
            self._reader.start()  # an interrupt came before; it closes what was opened
        self._reader.join(timeout)
        left = []
        if self._reader.is_alive():
            left.append(f"it did not exit within {timeout:g} s of its shutdown")
            self.abort()
            self._reader.join(_SIGNAL_SECONDS)
        elif not self.killed and self._exit not in (0, -signal.SIGKILL):
            left.append(f"it {self._exit_text()} after its shutdown")
        for pid in session_members(self._pid):
            left.append(f"process {pid}: {command_of(pid)}")
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._kept_output = self.output()
        return left

    def _task(self, fd: int) -> Task:
        settings = replace(self._settings, socket=fd, fake_device=_has_fake_device())
        return Task.function("zrpc.testing.child:main", settings).within(
            cwd=os.getcwd(),
            env={
                **without_launcher(os.environ),
                **self._shared.secret,
                "ZRPC_RUNTIME_DIR": str(self._shared.run),
                **self._restart_variables(),
            },
            sys_path=[os.path.abspath(entry) for entry in sys.path],
            line_buffered=True,
        )

    def _restart_variables(self) -> dict[str, str]:
        """Returns the variables that ``zrpc launch --max-restarts`` would set."""
        if not self._shared.spec.restarts or self._shared.spec.elastic:
            return {}
        return {_MAX_RESTARTS: "1000", _RESTART_COUNT: str(self._restarts)}

    @contextlib.contextmanager
    def _streams(self) -> Iterator[tuple[int, int]]:
        if self._output_path is None:
            yield 1, 2
            return
        with open(self._output_path, "ab") as output:  # a successor writes to it, too
            yield output.fileno(), output.fileno()

    def _request(self, what: str, *request: Any) -> Work[Any]:
        with self._sending:
            future = self._new_future(what)
            if not future.done():
                future.number, self._requests = self._requests, self._requests + 1
                send_request(self._connection, *request)
        return future

    def _read(self) -> None:
        """Runs in the reader thread, until the process is dead."""
        while self._connection in (ready := wait([self._connection, self._process])):
            try:
                reply = self._connection.recv_bytes()
            except (EOFError, OSError):
                wait([self._process])
                break
            self._on_reply(reply)
        del ready
        try:
            with server_lock:
                self._exit = self._shared.server.wait(self.pid, _SIGNAL_SECONDS)
        except (LaunchError, TimeoutError):  # the server died, and its children with it
            self._exit = None
        finally:
            advice = f"; if the test expects that, call mesh.kill({self.rank}) afterwards"
            text = f"{self.label} {self._exit_text()}{'' if self.killed else advice}"
            self.fail_waits(WorkerExited(text))
            with self._sending:  # no other thread uses the connection now
                self._connection.close()
            with self._lock:
                os.close(self._process)
                self._process = -1

    def _on_reply(self, data: bytes) -> None:
        with self._lock:
            future = next(iter(self._pending), None)
        if future is None:  # `fail_waits` has failed it meanwhile
            return
        try:
            reply = pickle.loads(data)
        except Exception as error:
            self._complete(future, error=error)
            return
        if reply[0]:
            self._complete(future, reply[1])
        else:
            self._complete(future, error=attribute(reply[1], self.label, reply[2]))

    def _signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._process, number)

    def _exit_text(self) -> str:
        if self._exit is None:
            return "is dead; its exit status is unknown"
        if self._exit >= 0:
            return f"exited with status {self._exit}"
        return f"was killed by {signal.Signals(-self._exit).name}"


@contextlib.contextmanager
def _pickling_by_value(modules: Sequence[str]) -> Iterator[None]:
    """Makes cloudpickle pickle functions and classes of these modules by value.

    A worker can import a test module only if pytest has put its directory on the path, and
    assertions that pytest has not rewritten don't show the compared values.
    """
    with _by_value_lock, contextlib.ExitStack() as stack:
        for name in modules:
            module = sys.modules.get(name)
            if module is not None and name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _has_fake_device() -> bool:
    device = sys.modules.get("zrpc.testing.device")  # it imports torch, which may not be needed
    return device is not None and device.is_added()
