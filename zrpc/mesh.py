"""The mesh that this process is a worker of: how to be in it, who is, and what all do together.

And what they have done, in numbers and in time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle

from zrpc.agent.current import agent_that_is_set, current_agent, find_agent, latest_agent
from zrpc.agent.stats import Stats, take_stats
from zrpc.api import init_rpc, shutdown
from zrpc.backend_registry import BackendType
from zrpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, Seconds
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import RpcBackendOptions, checked_timeout
from zrpc.services.collectives import Collectives, Workers
from zrpc.services.names.claims import find_named
from zrpc.services.rref.rref import RRef
from zrpc.services.tracing.service import DEFAULT_RECORDS, trace_mesh

T = TypeVar("T")


@contextlib.contextmanager
def session(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    shutdown_timeout: Seconds = DEFAULT_SHUTDOWN_TIMEOUT,
) -> Iterator[WorkerInfo]:
    """Joins a mesh for a ``with`` statement: `init_rpc` at its start, `shutdown` at its end.

    The shutdown is graceful: it waits until all workers have come to the end of theirs. If an
    exception ends the statement, this worker leaves at once, and the exception is raised. A child
    of ``os.fork`` is not a worker, and leaves nothing.

    Args:
        name: as in `init_rpc`.
        backend: as in `init_rpc`.
        rank: as in `init_rpc`.
        world_size: as in `init_rpc`.
        rpc_backend_options: as in `init_rpc`.
        shutdown_timeout: the limit of the graceful shutdown in seconds; 0 means no limit.

    Returns:
        A context manager that gives this worker's `WorkerInfo`.

    Raises:
        Exception: what `init_rpc` and `shutdown` raise.

    Example:
        >>> import zrpc
        >>> with zrpc.session() as worker:  # doctest: +SKIP
        ...     print(worker.name, zrpc.rpc_sync("worker0", max, args=(1, 2)))
        worker0 2
    """
    init_rpc(name, backend, rank, world_size, rpc_backend_options)
    try:
        yield current_agent().worker_info
    except BaseException:
        _leave(graceful=False)
        raise
    _leave(timeout=shutdown_timeout)


def _leave(**options: Any) -> None:
    if latest_agent() is not None:  # a forked child has none, and may end the statement too
        shutdown(**options)


def is_initialized() -> bool:
    """Returns whether this process is a worker: after `init_rpc`, and before `shutdown`.

    May be called from any thread.

    Example:
        >>> is_initialized()
        True
    """
    return find_agent() is not None


def get_actor(name: str, timeout: Seconds = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """Returns the actor that was made with a name, by any worker; waits until there is one.

    The actor may still be being made then: its calls wait for that, and so does ``rref.to_here()``.

    Args:
        name: as in `zrpc.remote`.
        timeout: seconds; 0 means no limit. Default: the default timeout of all calls.

    Raises:
        RpcTimeoutError: there was none in time.
        NotInitializedError: this process is not a worker.
        ValueError: the name is empty, or no string.

    May be called from any thread, handlers included.

    Example:
        >>> made = remote("worker1", list, args=([1, 2],), name="numbers")
        >>> get_actor("numbers", timeout=10).rpc_sync().index(2)
        1
        >>> get_actor("numbers") == made
        True
    """
    return find_named(current_agent(), name, timeout)


def get_worker_infos() -> list[WorkerInfo]:
    """Returns the workers that are in the mesh now, by rank; this one is among them.

    Lost workers are not among them, nor those that have not joined yet. May be called from any
    thread.

    Raises:
        NotInitializedError: this process is not a worker.

    Example:
        >>> [worker.name for worker in get_worker_infos()]
        ['worker0', 'worker1', 'worker2']
    """
    return current_agent().get_worker_infos()


def world_size() -> int:
    """Returns the number of workers of the mesh.

    In a mesh of a fixed size this is the number it began with, lost workers included. In an elastic
    mesh it is the number of workers that are in it now. May be called from any thread.

    Raises:
        NotInitializedError: this process is not a worker.

    Example:
        >>> world_size()
        3
    """
    agent = current_agent()
    return agent.membership.own_record.world_size or len(agent.get_worker_infos())


def set_rpc_timeout(timeout: Seconds) -> None:
    """Sets the default timeout of this worker's calls, in seconds; 0 means no limit.

    `get_rpc_timeout` returns it. May be called from any thread; calls made from now on have it.

    Raises:
        NotInitializedError: this process is not a worker.
        OptionError: it is negative.
        TypeError: it isn't a number.

    Example:
        >>> set_rpc_timeout(10)
        >>> get_rpc_timeout()
        10.0
    """
    agent_that_is_set().caller.rpc_timeout = checked_timeout("rpc_timeout", timeout)


def all_gather(obj: T, worker_names: Workers | None = None, timeout: Seconds = 0) -> dict[str, T]:
    """Returns the object that each worker passed, by the workers' names; all of them must call it.

    Args:
        obj: anything that can be sent.
        worker_names: the workers that take part, this one included, by name, rank or `WorkerInfo`.
            Default: all in the mesh.
        timeout: seconds; 0 means no limit.

    Raises:
        RpcTimeoutError: the others did not call it in time.
        WorkerDied: one of them is gone.
        SerializationError: ``obj`` can't be pickled.
        RpcError: one of them has gone on to a later call, or there is no such worker.
        TypeError: ``worker_names`` is no collection, such as a single name.
        ValueError: this worker isn't one of ``worker_names``.
        NotInitializedError: this process is not a worker.

    May be called from any thread. If several threads of a worker call it with the same workers,
    their calls are matched with the others' in the order in which they are made.

    Example:
        >>> all_gather(2 ** 5, worker_names=["worker0"])
        {'worker0': 32}
    """
    return current_agent().service(Collectives).gather(obj, worker_names, timeout)


def barrier(worker_names: Workers | None = None, timeout: Seconds = 0) -> None:
    """Waits until all workers have called it.

    Arguments, errors and threads are those of `all_gather`.

    Example:
        >>> barrier(["worker0"], timeout=10)
    """
    all_gather(None, worker_names, timeout)


def on_worker_lost(callback: Callable[[WorkerInfo], object]) -> RemovableHandle:
    """Calls ``callback(worker_info)`` for each worker that is lost.

    A worker is lost if it died, left without the others, or did not answer for longer than the
    option ``heartbeat_timeout``. Workers lost before this call count too. A graceful shutdown of
    the mesh loses no worker. A lost worker never comes back: one that is restarted under its name
    is a new worker, of the next incarnation.

    Args:
        callback: called once for each worker, in a thread of the agent in which it may make calls
            and wait for them. By then, calls to that worker have failed already. An error that it
            raises is logged. It can't be an ``async def`` function.

    Returns:
        A handle like those of torch's hooks; after ``handle.remove()`` it is no longer called.

    Raises:
        TypeError: ``callback`` can't be called, or is an ``async def`` function.
        NotInitializedError: this process is not a worker.

    May be called from any thread.

    Example:
        >>> handle = on_worker_lost(lambda worker: print(f"{worker.name} is gone"))
        >>> handle.remove()
    """
    return current_agent().lost.add(callback)


def on_worker_joined(callback: Callable[[WorkerInfo], object]) -> RemovableHandle:
    """Calls ``callback(worker_info)`` for each other worker of the mesh.

    It is called for the current members, and for workers that join later: those of an elastic mesh,
    and those that ``zrpc launch --max-restarts`` restarts. By then, the worker can be called by its
    name.

    Args:
        callback: see `on_worker_lost`.

    Returns:
        A handle; after ``handle.remove()`` the callback is no longer called.

    Raises:
        TypeError: see `on_worker_lost`.
        NotInitializedError: this process is not a worker.

    May be called from any thread.

    Example:
        >>> names = []
        >>> handle = on_worker_joined(lambda worker: names.append(worker.name))
        >>> handle.remove()
    """
    return current_agent().joined.add(callback)


def stats() -> Stats:
    """Returns what this worker has done so far, in numbers.

    It is cheap: the numbers are counted anyway. To see another worker's, call it there.

    Returns:
        A dataclass that can be pickled; ``dataclasses.asdict`` makes it ready for JSON.

    Raises:
        NotInitializedError: this process is not a worker.

    May be called from any thread, handlers included.

    Example:
        >>> rpc_sync("worker1", max, args=(1, 2))
        2
        >>> stats().calls["max"].number
        1
        >>> rpc_sync("worker1", stats).handlers["max"].number
        1
    """
    return take_stats(current_agent())


def trace(
    path: str | os.PathLike[str], max_records: int = DEFAULT_RECORDS
) -> contextlib.AbstractContextManager[None]:
    """Records what all workers do while a ``with`` statement runs, and writes it to one file.

    Open the file at https://ui.perfetto.dev. Each worker is a process there. It shows each call at
    its caller and at its callee, with arrows between them, the time on the wire and in the queue,
    references, backward passes, and the program's own spans (see `span`). What was in progress when
    the trace began or ended is left out. ``otherData`` in the file says how many records were
    dropped, and why traces of workers are missing.

    Args:
        path: the file; it is replaced.
        max_records: how many records each worker keeps, some 400 bytes each; the oldest are
            dropped. A call is one record at each end.

    Returns:
        A context manager.

    Raises:
        OSError: the file can't be written.
        ValueError: ``max_records`` is not possible.
        NotInitializedError: this process is not a worker.

    May be called from any thread. Workers that join later are not recorded.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file, trace(file.name):
        ...     rpc_sync("worker1", max, args=(1, 2))
        2
    """
    return trace_mesh(current_agent(), path, max_records)


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """Shows the time of a ``with`` statement in a trace, under a name.

    It costs next to nothing while no trace is on. It may be used in coroutines too.

    Args:
        name: what is shown.

    Raises:
        NotInitializedError: this process is not a worker.

    May be called from any thread.

    Example:
        >>> with span("load a batch"):
        ...     batch = torch.ones(2)
    """
    return current_agent().span(name)
