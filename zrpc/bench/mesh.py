"""A fresh mesh of processes to measure, as the benchmark's own process sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zrpc.bench.effort import Effort, Sample
from zrpc.bench.member import MemberSettings
from zrpc.launch import LaunchError, Starter, Task

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HungError", "Mesh", "MeshError"]

# Above the numbers that a preloaded module could have open in the fork server.
_SOCKETS_FROM = 200
_DIES_WITHIN = 5.0


class MeshError(Exception):
    """The mesh, or what was measured in it, has failed; the message says how, in a line."""


class HungError(MeshError):
    """There was no answer within the time that there is."""


@dataclass
class _Process:
    rank: int
    pid: int
    connection: Connection
    output: Path


class Mesh:
    """Some worker processes, of one library or of none. A context manager.

    Args:
        starter: what starts the processes.
        participant: a library's name, or ``limit``.
        workers: how many.
        joined: whether they form a mesh.
        tcp: whether only tcp is to be used.
        patience: seconds for all of them to join, and to leave.

    Entering starts it. Leaving ends it: gently, or by force after an error or where the
    workers don't end in time, which `complaints` then tells.

    Attributes:
        joined_in: how many seconds it took the processes to join each other.
        complaints: what went wrong at the end.
    """

    def __init__(
        self,
        starter: Starter,
        participant: str,
        workers: int,
        *,
        joined: bool = True,
        tcp: bool = False,
        patience: float = 60.0,
    ) -> None:
        self._starter = starter
        self._participant = participant
        self._workers = workers
        self._joined = joined
        self._tcp = tcp
        self._patience = patience
        self._processes: list[_Process] = []
        self._home = Path()
        self._paused = False
        self.joined_in = 0.0
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        # The starter removes it should this process be killed.
        self._home = Path(self._starter.make_directory())
        try:
            for rank in range(self._workers):
                self._spawn(rank)
            before = time.perf_counter()
            self._join()
            self.joined_in = time.perf_counter() - before
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.resume()
        try:
            if error is None:
                self._ask_all(self._processes, "leave")
                self._wait_for_ends()
        except MeshError as failure:
            self.complaints.append(f"{self._participant} could not be shut down: {failure}")
        finally:
            self._kill()

    def measure(
        self, workload: str, arguments: tuple[Any, ...], effort: Effort, deadline: float
    ) -> Sample:
        """Runs a workload on worker 0.

        Args:
            workload: a function of this package, as ``module:function``.
            arguments: what it is given after its session.
            effort: how much to measure.
            deadline: seconds after which it has failed.

        Raises:
            HungError: the deadline passed.
            MeshError: it failed, or a worker died.

        After an error the mesh should not be used any more.
        """
        self._send(self._processes[0], "measure", workload, arguments, effort)
        sample: Sample = self._replies(self._processes[:1], deadline, "no result")[0]
        return sample

    def pause(self) -> None:
        """Stops all processes, so that they take nothing from another mesh that is measured.

        An idle worker of torch's RPC keeps a processor busy: TensorPipe polls.
        """
        self._paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on, where they were paused."""
        if self._paused:
            self._paused = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(LaunchError):  # the starter has gone, and all of them with it
                self._starter.send_signal(process.pid, number)

    def _join(self) -> None:
        if self._participant == "limit":  # the echo first, so that its endpoint is known
            for process in reversed(self._processes):
                self._ask_all([process], "join")
        else:
            self._ask_all(self._processes, "join")

    def _ask_all(self, processes: list[_Process], request: str) -> None:
        for process in processes:
            self._send(process, request)
        self._replies(processes, self._patience, f"the workers did not {request}")

    def _send(self, process: _Process, *request: Any) -> None:
        # Where the process is dead, that is what the wait for its answer finds.
        with contextlib.suppress(OSError):
            process.connection.send(request)

    def _replies(self, processes: list[_Process], deadline: float, failed: str) -> list[Any]:
        """The answers of some; until they are there, the death of any other is noticed."""
        replies: dict[int, Any] = {}
        by_connection = {process.connection: process for process in self._processes}
        end = time.monotonic() + deadline
        while len(replies) < len(processes):
            left = end - time.monotonic()
            ready = wait(list(by_connection), max(0.0, left)) if left > 0 else []
            if not ready:
                raise HungError(f"{failed} within {deadline:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                process = by_connection.pop(connection)  # when it has left, it may end
                replies[process.rank] = self._receive(process)
        return [replies[process.rank] for process in processes]

    def _receive(self, process: _Process) -> Any:
        try:
            succeeded, value = process.connection.recv()
        except (EOFError, OSError):
            raise MeshError(self._end_of(process)) from None
        if not succeeded:
            raise MeshError(value)
        return value

    def _end_of(self, process: _Process) -> str:
        try:
            code = self._starter.wait(process.pid, _DIES_WITHIN)
        except (LaunchError, TimeoutError):
            return f"worker{process.rank} closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        lines = process.output.read_text(errors="replace").strip().splitlines()
        return f"worker{process.rank} {how}" + (f": {lines[-1].strip()}" if lines else "")

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        output = self._home / f"worker{rank}.output"
        with ours, theirs, output.open("wb") as log:
            fd = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _SOCKETS_FROM)
            try:
                pid = self._starter.spawn(
                    self._task(rank, fd), stdout=log.fileno(), stderr=log.fileno(), pass_fds=[fd]
                )
            finally:
                os.close(fd)
            self._processes.append(_Process(rank, pid, Connection(ours.detach()), output))

    def _task(self, rank: int, fd: int) -> Task:
        settings = MemberSettings(
            participant=self._participant,
            rank=rank,
            workers=self._workers,
            joined=self._joined,
            tcp=self._tcp,
            home=str(self._home),
            socket=fd,
        )
        return Task.function("zrpc.bench.member:main", settings).within(
            env={
                "OMP_NUM_THREADS": "1",  # as launchers set it
                **os.environ,
                "ZRPC_RUNTIME_DIR": str(self._home),
                **({"TP_SOCKET_IFNAME": "lo"} if self._tcp else {}),
            }
        )

    def _wait_for_ends(self) -> None:
        end = time.monotonic() + self._patience
        try:
            for process in self._processes:
                self._starter.wait(process.pid, max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise HungError(f"worker{process.rank} did not end") from None

    def _kill(self) -> None:
        """Ends what still runs, and frees all; more than once does no harm."""
        for process in self._processes:
            with contextlib.suppress(LaunchError):
                if self._starter.send_signal(process.pid, signal.SIGKILL, group=True):
                    with contextlib.suppress(TimeoutError):
                        self._starter.wait(process.pid, _DIES_WITHIN)
            process.connection.close()
        self._processes.clear()
        shutil.rmtree(self._home, ignore_errors=True)
