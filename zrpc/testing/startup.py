"""Starts meshes: for the pytest plugin, and for ``with`` statements elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zrpc.constants import Seconds
from zrpc.testing.mesh import Mesh
from zrpc.testing.spec import DEFAULT_TIMEOUT, DEFAULT_WORKERS, MeshSpec
from zrpc.testing.watchdog import Entry, Watchdog, print_report

# A worker that fails to start is reported at once. But in a mesh of threads the others wait for
# it until init_timeout has passed, so that is kept short.
_INIT_TIMEOUT_SECONDS = 10.0
_DROPPED = (
    "the mesh is shut down, since nothing holds its context manager any more: use local_mesh in a "
    "with statement, keep what it returns as well as the mesh, or use zrpc.start_mesh"
)


def warm_up(processes: bool, preload: Sequence[str] = ()) -> None:
    """Does the slow work that a process does once for all its meshes.

    It imports zrpc and torch, or starts a fork server that does. That takes seconds, so call it
    before a test's deadline is set.

    Args:
        processes: whether the meshes are of processes; otherwise they are of threads.
        preload: further modules for the fork server to import.

    Raises:
        LaunchError: the fork server could not be started.
    """
    if processes:
        from zrpc.testing.server import warm_server

        warm_server(preload)
    else:
        from zrpc.testing.threads import import_core

        import_core()


def start_mesh(
    spec: MeshSpec, watchdog: Watchdog, *, by_value: Iterable[str] = (), capture: bool = False
) -> Mesh:
    """Starts a mesh and returns it when all workers have joined.

    Args:
        spec: the specification of the mesh; its ``timeout`` is left to the watchdog.
        watchdog: stops the mesh at its deadline.
        by_value: the modules whose functions are sent to worker processes by value.
        capture: whether the output of worker processes is kept for `Mesh.output`.

    Raises:
        MeshTimeout: the deadline passed.
        Exception: what a worker failed with; the others are stopped.
    """
    __tracebackhide__ = True
    timeout = max(0.1, min(_INIT_TIMEOUT_SECONDS, 0.8 * watchdog.remaining()))
    spec = spec.replace(options={"init_timeout": timeout, **spec.options})
    if spec.processes:
        from zrpc.testing.processes import process_workers

        mesh = Mesh(spec, *process_workers(spec, by_value=by_value, capture=capture))
    else:
        from zrpc.testing.threads import thread_workers

        mesh = Mesh(spec, thread_workers(spec))
    try:
        watchdog.watch(mesh)
        mesh.start()
    except BaseException:
        mesh.shutdown(graceful=False)
        raise
    return mesh


def start_shared_mesh(spec: MeshSpec, *, by_value: Iterable[str], capture: bool) -> Mesh:
    """Starts a mesh without a deadline: each wait for it may take the specification's timeout.

    The other arguments, and the errors, are those of `start_mesh`.
    """
    __tracebackhide__ = True

    mesh: Mesh | None = None

    @contextlib.contextmanager
    def limit() -> Iterator[Watchdog]:
        __tracebackhide__ = True
        with Watchdog(spec.timeout, print_report) as watchdog, watchdog.interruptible():
            if mesh is not None:  # else `start_mesh` has it watched
                watchdog.watch(mesh)
            yield watchdog

    warm_up(spec.processes)
    with limit() as watchdog:
        mesh = start_mesh(spec, watchdog, by_value=by_value, capture=capture)
    mesh._limit = limit
    return mesh


@contextlib.contextmanager
def local_mesh(
    workers: int = DEFAULT_WORKERS,
    *,
    processes: bool = False,
    timeout: Seconds | None = DEFAULT_TIMEOUT,
    options: Mapping[str, Any] | None = None,
    faults: bool = False,
) -> Iterator[Mesh]:
    """Provides a mesh for a ``with`` statement, in scripts, notebooks and doctests.

    It is shut down gracefully at the end of the statement, and by force after an error. If it takes
    longer than its timeout, it is stopped, and the main thread is interrupted by an error; a
    coroutine is, if it is the one in the statement. A mesh that a notebook keeps from cell to cell,
    by a call of ``__enter__``, interrupts nothing between the cells: its next use raises the error.

    Args:
        workers: the number of workers; they are named ``worker0``, ``worker1``, …
        processes: whether each worker is a process; otherwise it is a thread of this process.
        timeout: seconds that the whole statement may take; None or 0 for no limit. The first
            import of torch does not count.
        options: keyword arguments for `zrpc.ZmqRpcBackendOptions`.
        faults: whether connections between the workers can be disturbed, see
            `zrpc.testing.faults`.

    Raises:
        MeshTimeout: the statement did not finish within ``timeout``.
        LeakError: a worker process left something behind after its shutdown.
        Exception: what a worker failed with.

    Example:
        >>> import zrpc
        >>> with local_mesh(2) as mesh:
        ...     mesh.run_all(lambda: zrpc.get_worker_info().name)
        ['worker0', 'worker1']
    """
    limit: Any = timeout or 0  # the specification has it in seconds
    spec = MeshSpec(workers, processes, limit, options or {}, faults=faults)
    warm_up(processes)
    entry = Entry(sys._getframe().f_back)
    with Watchdog(spec.timeout, last_resort=print_report, entry=entry) as watchdog:
        try:
            with watchdog.interruptible():
                mesh = start_mesh(spec, watchdog)
                yield mesh
        except BaseException as error:
            for started in watchdog.meshes:  # Ctrl-C may have come before `mesh` was set
                if isinstance(error, GeneratorExit):
                    started._fail_waits(RuntimeError(_DROPPED))
                started.shutdown(graceful=False)
            if watchdog.timed_out not in (None, error):
                raise watchdog.timed_out from error  # error is a consequence of it
            raise
        mesh.shutdown()
