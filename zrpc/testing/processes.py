"""A mesh of processes, forked from a server that has imported torch once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from zrpc.launch.errors import LaunchError
from zrpc.launch.forkserver import ForkServer
from zrpc.launch.task import Task
from zrpc.launch.worker import run_secret
from zrpc.testing.child import STACKS_SIGNAL, WorkerSettings
from zrpc.testing.failure import WorkerExited, attribute
from zrpc.testing.leaks import files_in
from zrpc.testing.proc import command_of, session_members, state_of
from zrpc.testing.server import server_lock, warm_server
from zrpc.testing.spec import MeshSpec
from zrpc.testing.worker import Worker, described

__all__ = ["ProcessWorker", "process_workers"]

# Above the numbers that a preloaded module could have open in the server.
_SOCKETS_FROM = 200
# Variables by which a worker knows that it may be started again, and how often it was.
_MAX_RESTARTS = "ZRPC_MAX_RESTARTS"
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Seconds: for the stacks of a process, for them to stop growing, for a killed one to be gone.
_STACKS_WITHIN = 1.0
_STACKS_SETTLE = 0.05
_DIES_WITHIN = 5.0

# The outermost calls, as faulthandler writes them, which are the same in all stacks.
_BOTTOM = re.compile(
    r'^  File "(<string>|.*/threading\.py|.*/zrpc/launch/(program|child)\.py)", line \d+ '
    r"in (<module>|become|run|_run_function|_bootstrap|_bootstrap_inner)\n",
    re.MULTILINE,
)

# cloudpickle's list of modules that go by value is global: the lock guards changes to it.
_by_value_lock = threading.Lock()


def process_workers(
    spec: MeshSpec, *, by_value: Iterable[str] = (), capture: bool = False
) -> tuple[list[Worker], Callable[[], list[str]]]:
    """The workers of a mesh of processes; none is started yet.

    Args:
        spec: what the mesh is like.
        by_value: the modules whose functions are sent by value.
        capture: whether to keep the workers' output; else it goes where this process's goes.

    Returns:
        The workers, and what to call once all are closed; it returns what they left behind.
    """
    server = warm_server()
    # For the store, the workers' sockets, output and stacks. Should this process be killed, the
    # server removes it.
    home = Path(server.make_directory())
    (home / "run").mkdir()
    modules = tuple(by_value)
    secret = run_secret(os.environ)
    workers = [
        ProcessWorker(name, rank, spec, server, home, modules, capture, secret)
        for rank, name in enumerate(spec.names)
    ]

    def clean_up() -> list[str]:
        # A killed worker can't remove its socket; that is the next agent's business.
        left = [] if any(worker.killed for worker in workers) else files_in(home / "run")
        shutil.rmtree(home, ignore_errors=True)
        return left

    return list(workers), clean_up


class ProcessWorker(Worker):
    """A worker that is a process; see `Worker`.

    Its functions go over a socket pair. One thread of ours waits for the answers, and for the
    process's end.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        spec: MeshSpec,
        server: ForkServer,
        home: Path,
        by_value: Sequence[str],
        capture: bool,
        secret: Mapping[str, str],
        restarts: int = 0,
    ) -> None:
        super().__init__(name, rank)
        self._secret = secret
        self._restarts = restarts
        self._spec = spec
        self._server = server
        self._home = home
        self._by_value = by_value
        self._output_path = home / f"{name}.output" if capture else None
        self._stacks_path = home / f"{name}.stacks"
        self._pid: int | None = None
        # What signals are sent to: unlike a process id, it can't come to mean another process.
        # -1 where there is none; guarded by self._lock, as it is closed when the process ends.
        self._process = -1
        self._killed = False
        self._shown = 0  # how much of the output new_output() has returned
        self._kept_output = ""  # all of it, once the file is gone
        self._exit: int | None = None
        # Held from a future's entry until its request is sent: replies come in that order.
        self._sending = threading.Lock()
        self._reader = threading.Thread(
            target=self._read, name=f"zrpc-test-{name}-reader", daemon=True
        )

    @property
    def label(self) -> str:
        """The worker as a reader knows it."""
        return f"{self.name} (pid {self._pid})"

    @property
    def killed(self) -> bool:
        """Whether the test has killed it."""
        return self._killed

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            RuntimeError: it was not started.
        """
        if self._pid is None:
            raise RuntimeError(f"{self.name} has no process: it was not started")
        return self._pid

    def successor(self) -> ProcessWorker:
        """Another one of the same name and rank, of the next incarnation; not started yet."""
        return ProcessWorker(
            self.name,
            self.rank,
            self._spec,
            self._server,
            self._home,
            self._by_value,
            self._output_path is not None,
            self._secret,
            self._restarts + 1,
        )

    def start(self) -> Future[Any]:
        """Forks the process and has it join the mesh."""
        ours, theirs = socket.socketpair()
        with ours, theirs, self._streams() as streams:
            fd = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _SOCKETS_FROM)
            try:
                pid = self._server.spawn(
                    self._task(fd), stdout=streams[0], stderr=streams[1], pass_fds=[fd]
                )
            finally:
                os.close(fd)
            try:
                self._process = os.pidfd_open(pid)
            except ProcessLookupError:
                raise WorkerExited(f"{self.name} (pid {pid}) ended as it was started") from None
            self._pid = pid
            self._connection = Connection(ours.detach())
        self._reader.start()
        return self._request("starts", "start")

    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        """Has ``fn(*args, **kwargs)`` run in the main thread of the process."""
        with _pickling_by_value(self._by_value):
            pickled = cloudpickle.dumps((fn, args, kwargs))
        return self._request(f"runs {described(fn)}", "call", pickled)

    def shutdown(self, graceful: bool) -> Future[list[str]]:
        """Has the worker leave its mesh; its process goes on."""
        return self._request("shuts down", "shutdown", graceful, self._spec.leaks)

    def ask_for_stacks(self) -> None:
        """Has the process write its stacks, for `stacks` to read; does not block."""
        self._signal(STACKS_SIGNAL)

    def stacks(self) -> str:
        """The stacks of its threads, innermost call first; takes a second at most."""
        if self._pid is None or self._process == -1:
            return f"none: it {'was not started' if self._pid is None else self._ended()}\n"
        end = time.monotonic() + _STACKS_WITHIN
        text, size = "", -1
        # faulthandler writes bit by bit, in a signal handler, and does not say when it is done.
        while time.monotonic() < end and (not text or len(text) != size):
            size = len(text)
            time.sleep(_STACKS_SETTLE)
            text = _text(self._stacks_path)
        return (
            _BOTTOM.sub("", text)
            or f"none within {_STACKS_WITHIN:g} s; state: {state_of(self._pid)}\n"
        )

    def output(self) -> str:
        """What it has written to stdout and stderr, where that is captured."""
        if self._output_path is not None and self._output_path.exists():
            return _text(self._output_path)
        return self._kept_output

    def new_output(self) -> str:
        """What it has written since the last call, where that is captured."""
        text = self.output()
        new, self._shown = text[self._shown :], len(text)
        return new

    def kill(self, timeout: float) -> None:
        """Kills the process and waits until it is dead, at most ``timeout`` seconds."""
        self._killed = True
        self.end()
        self._reader.join(timeout)

    def pause(self) -> None:
        """Stops the process, and waits until it is."""
        self._signal(signal.SIGSTOP)
        end = time.monotonic() + _DIES_WITHIN
        while state_of(self.pid) not in ("T", "Z", "") and time.monotonic() < end:
            time.sleep(0.001)  # no event tells of it to whoever is not its parent

    def resume(self) -> None:
        """Lets the process go on."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kills the process; does not wait for its death."""
        self._signal(signal.SIGKILL)

    def dismiss(self) -> None:
        """Ends the process once it has done what it was told to."""
        if self._pid is not None:
            with contextlib.suppress(OSError), self._sending:
                self._connection.send_bytes(pickle.dumps(("exit",)))

    def close(self, timeout: float) -> list[str]:
        """Waits for the process's end, by force after ``timeout`` seconds; frees what it holds.

        Returns:
            What the worker's end has left behind.
        """
        if self._pid is None:
            return []
        self._reader.join(timeout)
        left = []
        if self._reader.is_alive():
            left.append(f"it did not end within {timeout:g} s of its shutdown")
            self.end()
            self._reader.join(_DIES_WITHIN)
        elif self._exit not in (0, -signal.SIGKILL):
            left.append(f"it {self._ended()} after its shutdown")
        for pid in session_members(self._pid):
            left.append(f"process {pid}: {command_of(pid)}")
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._kept_output = self.output()
        return left

    def _task(self, fd: int) -> Task:
        settings = WorkerSettings(
            name=self.name,
            rank=self.rank,
            world_size=None if self._spec.elastic else self._spec.workers,
            # A store that is a file: no port to be taken, no server thread in this process,
            # and it survives the death of any worker.
            options={"init_method": f"file://{self._home}/store", **self._spec.options},
            socket=fd,
            stacks_path=str(self._stacks_path),
        )
        return Task.function("zrpc.testing.child:main", settings).within(
            cwd=os.getcwd(),
            env={
                **os.environ,
                **self._secret,
                "ZRPC_RUNTIME_DIR": str(self._home / "run"),
                **self._restart_variables(),
            },
            sys_path=[os.path.abspath(entry) for entry in sys.path],
            line_buffered=True,
        )

    def _restart_variables(self) -> dict[str, str]:
        """As ``zrpc launch --max-restarts`` sets them."""
        if not self._spec.restarts or self._spec.elastic:
            return {}
        return {_MAX_RESTARTS: "1000", _RESTART_COUNT: str(self._restarts)}

    @contextlib.contextmanager
    def _streams(self) -> Iterator[tuple[int, int]]:
        if self._output_path is None:
            yield 1, 2
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self._output_path, flags, 0o600)
        try:
            yield fd, fd
        finally:
            os.close(fd)

    def _request(self, what: str, *request: Any) -> Future[Any]:
        with self._sending:
            future = self._enter(what)
            if not future.done():
                # Where the process is dead, the reader fails the future.
                with contextlib.suppress(OSError):
                    self._connection.send_bytes(pickle.dumps(request))
        return future

    def _read(self) -> None:
        """The life of the reader thread: until the process is dead."""
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
                self._exit = self._server.wait(self.pid, _DIES_WITHIN)
        except (LaunchError, TimeoutError):  # the server died, and its children with it
            self._exit = None
        finally:
            self.fail(WorkerExited(f"{self.label} {self._ended()}"))
            with self._sending:  # nobody is using it
                self._connection.close()
            with self._lock:
                os.close(self._process)
                self._process = -1

    def _on_reply(self, data: bytes) -> None:
        with self._lock:
            future = next(iter(self._pending), None)
        if future is None:  # failed meanwhile, with all that was asked of this worker
            return
        try:
            reply = pickle.loads(data)
        except Exception as error:
            self._settle(future, error=error)
            return
        if reply[0]:
            self._settle(future, reply[1])
        else:
            self._settle(future, error=attribute(reply[1], self.label, reply[2]))

    def _signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._process, number)

    def _ended(self) -> str:
        if self._exit is None:
            return "is gone, and so is its exit code"
        if self._exit >= 0:
            return f"exited with status {self._exit}"
        return f"was killed by {signal.Signals(-self._exit).name}"


@contextlib.contextmanager
def _pickling_by_value(modules: Sequence[str]) -> Iterator[None]:
    """Has functions and classes of these modules pickled by value.

    A test module can be imported only where pytest has put its directory on the path, and
    without pytest its assertions say nothing.
    """
    with _by_value_lock, contextlib.ExitStack() as stack:
        for name in modules:
            module = sys.modules.get(name)
            if module is not None and name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
