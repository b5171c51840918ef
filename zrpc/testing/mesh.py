"""Mesh: the workers of a test, and functions that run on them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from zrpc.testing.failure import add_others
from zrpc.testing.leaks import LeakError
from zrpc.testing.relays import Relays
from zrpc.testing.spec import MeshSpec
from zrpc.testing.worker import Worker

if TYPE_CHECKING:
    from zrpc.agent import Agent
    from zrpc.testing.processes import ProcessWorker

__all__ = ["Mesh"]

P = ParamSpec("P")
T = TypeVar("T")

# One worker's failure often makes the others fail: how long to wait for theirs, in seconds.
_OTHERS_FAIL_WITHIN = 0.5
# How long a worker may take to end, in seconds: once it has been told to, and by force.
_ENDS_WITHIN = 5.0
_DIES_WITHIN = 1.0


class Mesh:
    """N workers that are connected with each other, for a test.

    Get one from the fixtures ``mesh`` and ``make_mesh``, or outside of pytest from
    `local_mesh`. Each worker runs the functions that it is given one after another: in a
    thread of this process with the worker's agent as the current one, or in the main thread
    of the worker's own process. How a function gets there has nothing to do with zrpc, so
    that a mesh also serves to find out why zrpc is broken.

    No wait outlives the deadline of the test: then the stacks of all workers are printed,
    the workers are ended, and what waits raises `MeshTimeout`.

    All methods may be called from any thread.

    Example:
        >>> import zrpc
        >>> from zrpc.testing import local_mesh
        >>> with local_mesh(3) as mesh:
        ...     mesh.run("worker0", zrpc.rpc_sync, "worker2", max, args=(1, 2))
        2
    """

    def __init__(
        self,
        spec: MeshSpec,
        workers: Sequence[Worker],
        clean_up: Callable[[], list[str]] | None = None,
    ) -> None:
        self._spec = spec
        self._workers = list(workers)
        self._clean_up = clean_up
        self._relays: Relays | None = None
        self._paused: set[str] = set()
        self._shut_down = False

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __repr__(self) -> str:
        kind = "processes" if self._spec.processes else "threads"
        return f"<Mesh of {len(self)} {kind}>"

    @property
    def names(self) -> list[str]:
        """The workers' names, by rank."""
        return [worker.name for worker in self._workers]

    def run(self, worker: str | int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs ``fn(*args, **kwargs)`` on a worker and returns the result.

        Args:
            worker: its name or its rank.
            fn: a plain function; one that is ``async def`` can be called from the worker, by
                `zrpc.rpc_sync`. In a mesh of processes it is pickled, by value where it comes from
                the test's module or can't be imported. Each time its module's globals go with it:
                keep a worker's state elsewhere, as in an attribute of a module that is imported.
            args: its arguments.
            kwargs: its keyword arguments.

        Raises:
            MeshTimeout: the test's deadline passed.
            WorkerExited: the worker's process ended.
            LookupError: there is no such worker.
            Exception: what ``fn`` raised, of its own type; a `WorkerTraceback` as the last
                of its causes tells the worker and the traceback there.
        """
        __tracebackhide__ = True
        return _result(self.submit(worker, fn, *args, **kwargs))

    def run_all(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Runs ``fn(*args, **kwargs)`` on all workers at once.

        Returns:
            The results, by rank.

        Raises:
            Exception: as `run` does, of the worker that failed first. The `WorkerTraceback`
                names the others that failed. A worker that still runs ``fn`` is not waited
                for.
        """
        __tracebackhide__ = True
        return _gather(self._workers, [w.submit(fn, args, kwargs) for w in self._workers])

    def submit(
        self, worker: str | int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Has ``fn(*args, **kwargs)`` run on a worker, after what it was given before.

        Args: see `run`.

        Returns:
            A future with the result, or with what `run` would raise. It can't be cancelled.

        Raises:
            LookupError: there is no such worker.
        """
        return self._worker(worker).submit(fn, args, kwargs)

    def agent(self, worker: str | int) -> Agent:
        """The agent of a worker of a mesh of threads.

        Raises:
            TypeError: the mesh is one of processes.
            RuntimeError: the agent is shut down.
        """
        from zrpc.testing.threads import ThreadWorker

        found = self._worker(worker)
        if not isinstance(found, ThreadWorker):
            raise TypeError(
                f"the agent of {found.label} is in another process; expected a mesh of threads. "
                "Use mesh.run(worker, fn) and find it there"
            )
        return found.agent

    def pid(self, worker: str | int) -> int:
        """The process id of a worker of a mesh of processes.

        Raises:
            TypeError: the mesh is one of threads.
        """
        return self._process(worker).pid

    def kill(self, worker: str | int) -> None:
        """Kills a worker of a mesh of processes (SIGKILL), and waits until it is dead.

        What waits for it, and what it is given later, fails with `WorkerExited`. The mesh is
        then not shut down gracefully.

        Raises:
            TypeError: the mesh is one of threads.
        """
        self._process(worker).kill(_DIES_WITHIN)

    def restart(self, worker: str | int) -> None:
        """Starts a worker that was killed again, in a new process, as ``zrpc launch`` does.

        It joins the mesh under its name and rank, of the next incarnation; returns when the
        others know it.

        Raises:
            TypeError: the mesh is one of threads.
            RuntimeError: the worker was not killed, or the mesh was made without
                ``restarts=True``.
            Exception: what it failed to join with.
        """
        __tracebackhide__ = True
        dead = self._process(worker)
        if not self._spec.restarts:
            raise RuntimeError("expected a mesh made with restarts=True: this one has a fixed end")
        if not dead.killed:
            raise RuntimeError(f"{dead.label} was not killed: expected mesh.kill({worker!r}) first")
        dead.close(_DIES_WITHIN)
        new = dead.successor()
        self._workers[self._workers.index(dead)] = new
        _gather([new], [new.start()])

    def pause(self, worker: str | int) -> None:
        """Stops the process of a worker of a mesh of processes (SIGSTOP).

        Raises:
            TypeError: the mesh is one of threads.
        """
        found = self._process(worker)
        self._paused.add(found.name)
        found.pause()

    def resume(self, worker: str | int) -> None:
        """Lets a worker that is paused go on (SIGCONT).

        Raises:
            TypeError: the mesh is one of threads.
        """
        found = self._process(worker)
        self._paused.discard(found.name)
        found.resume()

    def rank(self, worker: str | int) -> int:
        """The rank of a worker, by its name or rank.

        Raises:
            LookupError: there is no such worker.
        """
        return self._worker(worker).rank

    @property
    def relays(self) -> Relays:
        """What `zrpc.testing.faults` works with.

        Raises:
            RuntimeError: the mesh was made without ``faults=True``.
        """
        if self._relays is None:
            raise RuntimeError(
                "expected a mesh made with faults=True, in the marker zrpc or of local_mesh: the "
                "connections of this one can't be disturbed"
            )
        return self._relays

    def output(self, worker: str | int) -> str:
        """What a worker process has written to stdout and stderr, where that is captured.

        Raises:
            TypeError: the mesh is one of threads.
        """
        return self._process(worker).output()

    def start(self) -> None:
        """Starts the workers; returns once all of them are connected.

        Raises:
            Exception: what a worker failed with; the mesh is to be shut down.
        """
        __tracebackhide__ = True
        _gather(self._workers, [worker.start() for worker in self._workers])
        if self._spec.faults:
            # Nobody has connected to anybody yet: workers do when they first send.
            found = self.run_all(_inbox_and_token)
            inboxes = [Path(inbox) for inbox, _ in found]
            self._relays = Relays(inboxes, {token: i for i, (_, token) in enumerate(found)})

    def shutdown(self, graceful: bool = True) -> None:
        """Ends the mesh; what it does after the first call is nothing.

        Args:
            graceful: have the workers agree on the end and look for what they leave behind.
                Else their processes are killed, and their agents in this process closed.

        Raises:
            MeshTimeout: the test's deadline passed meanwhile.
            WorkerExited: a process ended that should not have.
            LeakError: a worker process had something left after its shutdown.
            Exception: what the agent's shutdown raised.
        """
        if self._shut_down:
            return
        self._shut_down = True
        try:
            self._shutdown(graceful)
        finally:
            if self._relays is not None:
                self._relays.close()

    def _shutdown(self, graceful: bool) -> None:
        for name in list(self._paused):
            self.resume(name)
        if self._relays is not None:
            self._relays.mend()
        left: list[str] = []
        if graceful:
            try:
                left = self._leave()
            except BaseException:
                self._end(by_force=True)
                raise
        left += self._end(by_force=not graceful)
        if graceful and left and self._spec.leaks:
            # A process that outlives its worker was there at the worker's shutdown already.
            raise LeakError(list(dict.fromkeys(left)))

    def new_output(self) -> list[tuple[str, str]]:
        """The name and new output of each worker process that wrote some since the last call."""
        outputs = [(worker.name, worker.new_output()) for worker in self._workers]
        return [(name, text) for name, text in outputs if text]

    # What the watchdog calls, in its own thread.

    def busy(self) -> list[str]:
        """What is under way on which worker, a line for each."""
        return [f"{w.label} {what}" for w in self._workers for what in w.busy()[:1]]

    def stacks(self) -> str:
        """The stacks of all threads of all workers; takes a second at most."""
        for worker in self._workers:
            worker.ask_for_stacks()
        return "\n".join(f"---- stacks of {w.label} ----\n{w.stacks()}" for w in self._workers)

    def pids(self) -> set[int]:
        """The processes in which its workers are."""
        if not self._spec.processes:
            return {os.getpid()}
        found = set()
        for worker in self._workers:
            with contextlib.suppress(RuntimeError):  # it was not started
                found.add(self._process(worker.name).pid)
        return found

    def fail(self, error: BaseException) -> None:
        """Fails all that waits for the workers, now and later, with ``error``."""
        for worker in self._workers:
            worker.fail(error)

    def end(self) -> None:
        """Ends what the workers are doing, by force where possible; does not block."""
        for worker in self._workers:
            worker.end()

    def _leave(self) -> list[str]:
        workers = [worker for worker in self._workers if not worker.killed]
        # A graceful shutdown is agreed upon by all, which the dead can't.
        graceful = len(workers) == len(self._workers)
        futures = [worker.shutdown(graceful) for worker in workers]
        left = _gather(workers, futures)
        return _labelled(workers, left)

    def _end(self, by_force: bool) -> list[str]:
        end = time.monotonic() + (_DIES_WITHIN if by_force else _ENDS_WITHIN)
        self.fail(RuntimeError("the mesh is shut down"))
        if by_force:
            self.end()
        for worker in self._workers:
            worker.dismiss()
        left = [worker.close(max(0.0, end - time.monotonic())) for worker in self._workers]
        return _labelled(self._workers, left) + (self._clean_up() if self._clean_up else [])

    def _worker(self, worker: str | int) -> Worker:
        for candidate in self._workers:
            if worker in (candidate.name, candidate.rank) and not isinstance(worker, bool):
                return candidate
        raise LookupError(
            f"expected a worker's name ({', '.join(self.names)}) or rank (0 to {len(self) - 1}), "
            f"but got {worker!r}"
        )

    def _process(self, worker: str | int) -> ProcessWorker:
        from zrpc.testing.processes import ProcessWorker

        found = self._worker(worker)
        if not isinstance(found, ProcessWorker):
            raise TypeError(
                f"{found.label} has no process of its own; expected a mesh of processes. "
                "Mark the test with @pytest.mark.zrpc(processes=True)"
            )
        return found


def _inbox_and_token() -> tuple[str, bytes]:
    """On a worker: its Unix socket, and what its routing ids end in."""
    from zrpc.current import current_agent

    membership = current_agent().membership
    card = membership.cards[membership.rank]
    if not card.ipc:
        raise ValueError(
            "faults between workers need their Unix sockets: expected the option transport='auto' "
            "or 'ipc', found 'tcp'"
        )
    return f"{card.directory}/inbox", card.identity[1:]


def _labelled(workers: Sequence[Worker], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"{w.label}: {line}" for w, its in zip(workers, lines, strict=True) for line in its]


def _gather(workers: Sequence[Worker], futures: Sequence[Future[T]]) -> list[T]:
    """The results of all futures, or the first failure, which tells of the others."""
    __tracebackhide__ = True
    done, rest = wait(futures, return_when=FIRST_EXCEPTION)
    first = next((f for f in futures if f in done and f.exception() is not None), None)
    if first is not None:
        wait(rest, timeout=_OTHERS_FAIL_WITHIN)
        others = {
            worker.label: error
            for worker, future in zip(workers, futures, strict=True)
            if future is not first and future.done() and (error := future.exception())
        }
        error = first.exception()
        assert error is not None  # it is what makes it the first
        raise add_others(error, others)
    return [future.result() for future in futures]


def _result(future: Future[T]) -> T:
    """What ``future.result()`` is, with a traceback that holds nothing but the worker's."""
    __tracebackhide__ = True
    error = future.exception()
    if error is not None:
        raise error
    return future.result()
