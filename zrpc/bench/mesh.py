"""A fresh mesh of worker processes, controlled by the benchmark's own process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from zrpc.bench.library import ACTOR_LIBRARIES, WorkerSettings
from zrpc.bench.namespaces import CABLE
from zrpc.bench.session import Sample, Sampling
from zrpc.launch import LaunchError, Starter, Task
from zrpc.membership.secret import new_secret
from zrpc.testing.served import send_request, start_serving

_EXIT_SECONDS = 5.0


class MeshError(Exception):
    """The mesh, or a workload in it, has failed; the message is one line."""


class HungError(MeshError):
    """There was no reply before the deadline."""


def environment() -> dict[str, str]:
    """Returns the variables of all measured processes, and of those that fork them."""
    # Launchers set this too. torch reads it when it is loaded.
    return {"OMP_NUM_THREADS": "1", **os.environ}


@dataclass
class _Process:
    rank: int
    pid: int
    connection: Connection
    output: Path


class Mesh:
    """The worker processes of one library, or of none. A context manager.

    Args:
        starter: starts the processes.
        participant: a library's name, or ``limit``.
        workers: the number of workers.
        namespaces: the network namespace of each worker; default: that of this process.
        timeout: the seconds for all workers to join, and to leave.
        settings: others of the `WorkerSettings`.

    Entering it starts the processes. Leaving it shuts them down gracefully. After an error, or if
    workers don't exit in time, it kills them. `shutdown_errors` reports workers that were too slow.

    Attributes:
        directory: for their sockets and output; it is removed in the end.
        timeout: as given.
        join_seconds: the seconds that the processes took to join each other.
        shutdown_errors: errors in the shutdown.
    """

    def __init__(
        self,
        starter: Starter,
        participant: str,
        workers: int,
        *,
        namespaces: Sequence[str] = (),
        timeout: float = 60.0,
        **settings: Any,
    ) -> None:
        self._starter = starter
        self._settings = WorkerSettings(participant, workers, **settings)
        self._secret = {"ZRPC_SECRET": new_secret()} if self._settings.keys else {}
        self._namespaces = namespaces
        self.timeout = timeout
        self._processes: list[_Process] = []
        self.directory = Path()
        self._paused = False
        self.join_seconds = 0.0
        self.shutdown_errors: list[str] = []

    def __enter__(self) -> Self:
        # The starter removes the directory if this process is killed.
        self.directory = Path(self._starter.make_directory())
        try:
            # A library of actors starts the other processes itself.
            alone = self._settings.participant in ACTOR_LIBRARIES
            for rank in range(1 if alone else self._settings.workers):
                self._start_process(rank)
            before = time.perf_counter()
            self._join()
            self.join_seconds = time.perf_counter() - before
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.resume()
        try:
            if error is None:
                self._request_all(self._processes, "leave")
                self._wait_for_exits()
        except MeshError as failure:
            name = self._settings.participant
            self.shutdown_errors.append(f"{name} could not be shut down: {failure}")
        finally:
            self._kill()

    def measure(
        self, workload: str, arguments: tuple[Any, ...], sampling: Sampling, deadline: float
    ) -> Sample:
        """Runs a workload on worker 0.

        After an error the mesh must not be used again.

        Args:
            workload: a function of this package, as ``module:function``.
            arguments: the function's arguments after its session.
            sampling: how long and how often to repeat it.
            deadline: the seconds after which it has failed.

        Raises:
            HungError: the deadline passed.
            MeshError: it failed, or a worker died.
        """
        send_request(self._processes[0].connection, "measure", workload, arguments, sampling)
        sample: Sample = self._receive_replies(self._processes[:1], deadline, "no result")[0]
        return sample

    def pause(self) -> None:
        """Stops all processes, so that they take no processor time from another mesh.

        An idle worker of torch's RPC keeps a processor busy: TensorPipe polls.
        """
        self._paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continues all processes if they are paused."""
        if self._paused:
            self._paused = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(LaunchError):  # the starter has exited, and so have they
                self._starter.send_signal(process.pid, number)

    def _join(self) -> None:
        together = [self._processes]
        if self._settings.participant == "limit":  # the echo first: its endpoint must be known
            together = [[process] for process in reversed(self._processes)]
        for processes in together:
            self._request_all(processes, "join")

    def _request_all(self, processes: list[_Process], request: str) -> None:
        for process in processes:
            send_request(process.connection, request)
        self._receive_replies(processes, self.timeout, f"the workers did not {request}")

    def _receive_replies(
        self, processes: list[_Process], deadline: float, failed: str
    ) -> list[Any]:
        """Returns the replies of some processes; fails if any other process dies meanwhile."""
        replies: dict[int, Any] = {}
        waiting: dict[Any, _Process] = {each.connection: each for each in self._processes}
        end = time.monotonic() + deadline
        while len(replies) < len(processes):
            left = end - time.monotonic()
            ready = wait(list(waiting), left) if left > 0 else []
            if not ready:
                raise HungError(f"{failed} within {deadline:g} s")
            for process in map(waiting.pop, ready):
                replies[process.rank] = self._receive(process)
        return [replies[process.rank] for process in processes]

    def _receive(self, process: _Process) -> Any:
        try:
            succeeded, value = process.connection.recv()
        except (EOFError, OSError):
            raise MeshError(self._exit_text(process)) from None
        if not succeeded:
            raise MeshError(value)
        return value

    def _exit_text(self, process: _Process) -> str:
        try:
            code = self._starter.wait(process.pid, _EXIT_SECONDS)
        except (LaunchError, TimeoutError):
            return f"worker{process.rank} closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        lines = process.output.read_text(errors="replace").strip().splitlines()
        return f"worker{process.rank} {how}" + (f": {lines[-1].strip()}" if lines else "")

    def _start_process(self, rank: int) -> None:
        output = self.directory / f"worker{rank}.output"
        with output.open("wb") as log:
            task = partial(self._task, rank)
            pid, connection = start_serving(self._starter, task, log.fileno(), log.fileno())
        self._processes.append(_Process(rank, pid, connection, output))

    def _task(self, rank: int, fd: int) -> Task:
        namespace = self._namespaces[rank] if self._namespaces else ""
        directory = str(self.directory)
        settings = replace(
            self._settings, rank=rank, namespace=namespace, directory=directory, socket=fd
        )
        variables = {"ZRPC_RUNTIME_DIR": directory, **self._network_variables()}
        task = Task.function("zrpc.bench.worker:main", settings)
        return task.within(env=environment() | variables)

    def _network_variables(self) -> dict[str, str]:
        """Returns the variables that choose the interface, and the secret for the keys."""
        if not self._settings.tcp:
            return {}
        interface = CABLE if self._namespaces else "lo"
        # torch's RPC meets by Gloo, which would choose an interface of its own.
        names = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "ZRPC_IFACE")
        return dict.fromkeys(names, interface) | self._secret

    def _wait_for_exits(self) -> None:
        end = time.monotonic() + self.timeout
        for process in self._processes:
            send_request(process.connection, "exit")
        try:
            for process in self._processes:
                self._starter.wait(process.pid, max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise HungError(f"worker{process.rank} did not exit") from None

    def _kill(self) -> None:
        """Kills the remaining processes and releases all resources; may be called repeatedly."""
        for process in self._processes:
            with contextlib.suppress(LaunchError):
                if self._starter.send_signal(process.pid, signal.SIGKILL, group=True):
                    with contextlib.suppress(TimeoutError):
                        self._starter.wait(process.pid, _EXIT_SECONDS)
            process.connection.close()
        self._processes.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
