"""Mesh: the workers of a test, and functions that run on them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, overload

from zrpc.errors import advise
from zrpc.testing.faults.proxy import Relays
from zrpc.testing.leaks import LeakError
from zrpc.testing.spec import MeshSpec
from zrpc.testing.worker import Work, Worker, results_of

if TYPE_CHECKING:
    from zrpc.agent.agent import Agent
    from zrpc.testing.processes import ProcessWorker

P = ParamSpec("P")
T = TypeVar("T")
Now: TypeAlias = Callable[P, T]
Later: TypeAlias = Callable[P, Coroutine[Any, Any, T]]

# How long workers may take to stop when they were asked to: on a busy machine, the end of a
# process that has imported torch takes up to a few tenths of a second of a processor.
_STOP_SECONDS = 5.0
_STOP_SECONDS_PER_WORKER = 0.5
# How long a killed worker may take to stop.
_KILL_SECONDS = 1.0
_ADVICE = (
    "or, since this code isn't a worker of the mesh that this process has started, run a function "
    'on one, as in mesh.run("worker0", zrpc.rpc_sync, "worker1", fn).'
)


class Mesh:
    """N connected workers, for a test.

    Get one from the fixtures ``mesh`` and ``make_mesh``, or outside of pytest from
    `local_mesh`. Each worker runs the functions submitted to it one after another. It runs
    them in a thread of this process, with its agent as the current one, or in the main thread
    of its own process. Functions reach the workers without zrpc, so a mesh also helps to
    find out why zrpc is broken.

    No wait outlives the deadline of the test. At the deadline the stacks of all workers are
    printed, the workers are stopped, and every wait raises `MeshTimeout`.

    All methods may be called from any thread. Those with an underscore are for this package:
    the watchdog and the pytest plugin call some of them.

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
        # Limits a wait; set if no test or statement has a deadline for all of them.
        self._limit: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self._workers = list(workers)
        self._clean_up = clean_up
        self._relays: Relays | None = None
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

    @overload
    def run(
        self, worker: str | int, fn: Later[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def run(self, worker: str | int, fn: Now[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def run(self, worker: str | int, fn: Now[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Runs ``fn(*args, **kwargs)`` on a worker and returns the result.

        Args:
            worker: the worker's name or rank.
            fn: a function; if it is an ``async def`` function, it is awaited. In a mesh of
                processes ``fn`` is pickled: by value if it comes from the test's module or can't
                be imported. The globals of its module then travel with each call, so keep a
                worker's state elsewhere, for example in an attribute of an imported module.
            args: the arguments of ``fn``.
            kwargs: the keyword arguments of ``fn``.

        Raises:
            MeshTimeout: the test's deadline passed.
            WorkerExited: the worker's process exited.
            LookupError: there is no such worker.
            Exception: what ``fn`` raised, with its own type. The last of its causes is a
                `WorkerTraceback` with the worker's name and the traceback there.

        If the wait is interrupted, as by Ctrl-C, a worker that is a process gets a
        KeyboardInterrupt in ``fn``. A thread can't be interrupted: ``fn`` runs on, beside what the
        worker runs next, and a warning says so.
        """
        __tracebackhide__ = True
        with self._limit():
            found = self._worker(worker)
            return results_of([found], [found.submit(fn, args, kwargs)], interrupts=True)[0]

    @overload
    def run_all(self, fn: Later[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    def run_all(self, fn: Now[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def run_all(self, fn: Now[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        """Runs ``fn(*args, **kwargs)`` on all workers at once.

        Returns:
            The results, by rank.

        Raises:
            Exception: what `run` raises, from the worker that failed first. The
                `WorkerTraceback` names the others that failed. Workers that are still
                running ``fn`` are not waited for.
        """
        __tracebackhide__ = True
        with self._limit():
            work = [worker.submit(fn, args, kwargs) for worker in self._workers]
            return results_of(self._workers, work, interrupts=True)

    @overload
    def submit(
        self, worker: str | int, fn: Later[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Work[T]: ...
    @overload
    def submit(
        self, worker: str | int, fn: Now[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Work[T]: ...
    def submit(
        self, worker: str | int, fn: Now[P, Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Work[Any]:
        """Queues ``fn(*args, **kwargs)`` on a worker, behind what was submitted before.

        Takes the arguments of `run`.

        Returns:
            A ``concurrent.futures.Future`` of the result, or of what `run` would raise. It can
            also be awaited. It can't be cancelled.

        Raises:
            LookupError: there is no such worker.
        """
        return self._worker(worker).submit(fn, args, kwargs)

    def agent(self, worker: str | int) -> Agent:
        """Returns the agent of a worker, in a mesh of threads.

        Raises:
            TypeError: the workers are processes.
            RuntimeError: the agent is shut down.
        """
        from zrpc.testing.threads import ThreadWorker

        found = self._worker(worker)
        if not isinstance(found, ThreadWorker):
            raise TypeError(
                f"expected a mesh of threads, but {found.label} is another process: use "
                "mesh.run(worker, fn) to reach its agent there"
            )
        return found.agent

    def pid(self, worker: str | int) -> int:
        """Returns the process id of a worker, in a mesh of processes.

        Raises:
            TypeError: the workers are threads.
        """
        return self._process(worker).pid

    def kill(self, worker: str | int) -> None:
        """Kills a worker's process (SIGKILL), and waits until it is dead.

        Pending and later `run` and `submit` calls for it fail with `WorkerExited`. The mesh is
        then not shut down gracefully.

        If a worker has exited by itself, as the test expects, call this too: the end of the mesh
        raises `WorkerExited` otherwise, and `restart` refuses it.

        Raises:
            TypeError: the workers are threads.
        """
        self._process(worker).kill(_KILL_SECONDS)

    def restart(self, worker: str | int) -> None:
        """Restarts a killed worker in a new process, as ``zrpc launch`` does.

        The worker joins the mesh under its old name and rank, as the next incarnation. Returns
        when the others know it.

        Raises:
            TypeError: the workers are threads.
            RuntimeError: the worker was not killed, or the mesh was made without
                ``restarts=True``.
            Exception: the error with which the worker failed to join.
        """
        __tracebackhide__ = True
        dead = self._process(worker)
        if not self._spec.restarts:
            raise RuntimeError(
                "expected a mesh made with restarts=True: this one allows no restarts"
            )
        if not dead.killed:
            raise RuntimeError(f"{dead.label} was not killed: expected mesh.kill({worker!r}) first")
        dead.close(_KILL_SECONDS)
        new = dead.successor()
        self._workers[self._workers.index(dead)] = new
        results_of([new], [new.start()])

    def pause(self, worker: str | int) -> None:
        """Pauses a worker's process (SIGSTOP).

        Raises:
            TypeError: the workers are threads.
        """
        self._process(worker).pause()

    def resume(self, worker: str | int) -> None:
        """Resumes a paused worker's process (SIGCONT).

        Raises:
            TypeError: the workers are threads.
        """
        self._process(worker).resume()

    def rank(self, worker: str | int) -> int:
        """Returns the rank of a worker, given its name or rank.

        Raises:
            LookupError: there is no such worker.
        """
        return self._worker(worker).rank

    @property
    def relays(self) -> Relays:
        """The relays that `zrpc.testing.faults` uses.

        Raises:
            RuntimeError: the mesh was made without ``faults=True``.
        """
        if self._relays is None:
            raise RuntimeError(
                "expected a mesh made with faults=True, but this one has no relays: pass it to the "
                "marker zrpc or to local_mesh"
            )
        return self._relays

    def output(self, worker: str | int) -> str:
        """Returns what a worker process has written to stdout and stderr, if that is captured.

        Raises:
            TypeError: the workers are threads.
        """
        return self._process(worker).output()

    def start(self) -> None:
        """Starts the workers; returns when all have joined. The fixtures and `local_mesh` call it.

        Raises:
            Exception: what a worker failed with; the caller must shut the mesh down.
        """
        __tracebackhide__ = True
        results_of(self._workers, [worker.start() for worker in self._workers])
        advise(self, _ADVICE)
        if self._spec.faults:
            # No worker has connected to another yet: it does so when it first sends.
            found = self.run_all(_inbox_and_token)
            inboxes = [Path(inbox) for inbox, _ in found]
            self._relays = Relays(inboxes, {token: i for i, (_, token) in enumerate(found)})

    def shutdown(self, graceful: bool = True) -> None:
        """Shuts the mesh down. Later calls do nothing.

        Args:
            graceful: shut the workers down together, and check what they leave behind.
                Otherwise kill their processes, and close their agents in this process.

        Raises:
            MeshTimeout: the test's deadline passed meanwhile.
            WorkerExited: a process exited that the test did not kill.
            LeakError: a worker process left something behind after its shutdown.
            Exception: what an agent's shutdown raised.
        """
        if self._shut_down:
            return
        self._shut_down = True
        advise(self, None)
        try:
            with self._limit():
                self._shutdown(graceful)
        finally:
            if self._relays is not None:
                self._relays.close()

    def _shutdown(self, graceful: bool) -> None:
        if self._relays is not None:
            self._relays.mend()
        left: list[str] = []
        if graceful:
            try:
                left = self._leave()
            except BaseException:
                self._stop(by_force=True)
                raise
        left += self._stop(by_force=not graceful)
        if graceful and left and self._spec.leaks:
            # A process that outlives its worker was already listed at the worker's shutdown.
            raise LeakError(list(dict.fromkeys(left)))

    def _new_output(self) -> list[tuple[str, str]]:
        """Returns the name and new output of each worker process that wrote any.

        For the pytest plugin. New is what was written since the last call.
        """
        outputs = [(worker.name, worker.new_output()) for worker in self._workers]
        return [(name, text) for name, text in outputs if text]

    # -- for the watchdog, in its thread -------------------------------------------------

    def _work_in_progress(self) -> list[str]:
        """Returns what each busy worker is doing, one line per worker."""
        return [f"{w.label} {what}" for w in self._workers for what in w.pending_work()[:1]]

    def _stacks(self) -> str:
        """Returns the stacks of all threads of all workers, within a second."""
        for worker in self._workers:
            worker.ask_for_stacks()
        return "\n".join(f"---- stacks of {w.label} ----\n{w.stacks()}" for w in self._workers)

    def _process_ids(self) -> set[int]:
        """Returns the processes in which the workers run."""
        if not self._spec.processes:
            return {os.getpid()}
        found = set()
        for worker in self._workers:
            with contextlib.suppress(RuntimeError):  # it was not started
                found.add(self._process(worker.name).pid)
        return found

    def _fail_waits(self, error: BaseException) -> None:
        """Fails all current and later waits for the workers with ``error``."""
        for worker in self._workers:
            worker.fail_waits(error)

    def _abort(self) -> None:
        """Stops what the workers are doing, by force if possible; does not block."""
        for worker in self._workers:
            worker.abort()

    # ------------------------------------------------------------------------------------

    def _leave(self) -> list[str]:
        workers = [worker for worker in self._workers if not worker.killed]
        # All workers have to agree on a graceful shutdown, and a dead one can't.
        graceful = len(workers) == len(self._workers)
        futures = [worker.shutdown(graceful) for worker in workers]
        left = results_of(workers, futures)
        return _labelled(workers, left)

    def _stop(self, by_force: bool) -> list[str]:
        allowed = _STOP_SECONDS + _STOP_SECONDS_PER_WORKER * len(self._workers)
        deadline = time.monotonic() + (_KILL_SECONDS if by_force else allowed)
        self._fail_waits(RuntimeError("the mesh is shut down"))
        if by_force:
            self._abort()
        for worker in self._workers:
            worker.stop_when_idle()
        left = [worker.close(max(0.0, deadline - time.monotonic())) for worker in self._workers]
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
                f"expected a mesh of processes, but {found.label} has no process of its own: mark "
                "the test with @pytest.mark.zrpc(processes=True)"
            )
        return found


def _inbox_and_token() -> tuple[str, bytes]:
    """On a worker: returns its Unix socket, and the token in its routing ids."""
    from zrpc.agent.current import current_agent

    membership = current_agent().membership
    record = membership.records[membership.own_id]
    if not record.ipc:
        raise ValueError(
            "expected the option transport='auto' or 'ipc', found 'tcp': faults between workers "
            "need their Unix sockets"
        )
    return f"{record.directory}/inbox", record.identity[1:]


def _labelled(workers: Sequence[Worker], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"{w.label}: {line}" for w, its in zip(workers, lines, strict=True) for line in its]
