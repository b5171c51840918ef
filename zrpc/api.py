"""The functions that programs call: thin, over the agent of the present context."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Store
from torch.distributed import is_available as is_distributed_available
from torch.utils.hooks import RemovableHandle

from zrpc.agent import Agent
from zrpc.autograd.layer import plug_in as plug_in_autograd
from zrpc.backend_registry import BackendType
from zrpc.caller import UNSET_RPC_TIMEOUT
from zrpc.current import (
    current_agent,
    default_agent,
    find_agent,
    latest_agent,
    not_initialized,
    set_default_agent,
)
from zrpc.errors import NotInitializedError, RendezvousError, RpcError
from zrpc.futures import Future
from zrpc.gathering import GatheringLayer
from zrpc.gathering import plug_in as plug_in_gatherings
from zrpc.init_method import resolve_rank, restart_count
from zrpc.inspection.layer import plug_in as plug_in_inspection
from zrpc.joining import join_mesh
from zrpc.options import RpcBackendOptions, ZmqRpcBackendOptions, checked_timeout
from zrpc.rendezvous import StoreLost
from zrpc.roll_call import plug_in as plug_in_roll_call
from zrpc.rref.rref import RRef
from zrpc.rref.rref import plug_in as plug_in_rrefs
from zrpc.secret import ClusterSecret, find_secret
from zrpc.shared_memory import plug_in as plug_in_shared_memory
from zrpc.store import connect_store
from zrpc.wire.kind import Kind
from zrpc.worker_info import WorkerInfo

__all__ = [
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "on_worker_joined",
    "on_worker_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "start_agent",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
To = str | int | WorkerInfo
Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None

# Held during init_rpc: one at a time.
_init_lock = threading.Lock()
_collected = threading.local()


def is_available() -> bool:
    """Whether this build of torch has what zrpc needs of ``torch.distributed``."""
    return is_distributed_available()


def start_agent(
    name: str,
    *,
    rank: int | None,
    world_size: int | None,
    store: Store,
    options: ZmqRpcBackendOptions | None = None,
    init_method: str = "",
    secret: ClusterSecret | None = None,
    restarts: int | None = None,
) -> Agent:
    """Starts an agent with all that zrpc has, without making it the process's default.

    For several workers in one process, as tests have them; see `zrpc.testing`. The arguments
    and errors are those of `join_mesh`.
    """
    return join_mesh(
        name,
        rank=rank,
        world_size=world_size,
        store=store,
        options=options,
        layers=[
            plug_in_shared_memory,
            plug_in_rrefs,
            plug_in_autograd,
            plug_in_inspection,
            plug_in_gatherings,
            plug_in_roll_call,
        ],
        init_method=init_method,
        secret=secret,
        restarts=restarts,
    )


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Joins this process to a mesh of workers; returns when all of them are there.

    Without a world size the mesh is *elastic*: workers join and leave it while it runs. Then it
    returns when the members that are there know this worker.

    Args:
        name: this worker's name, unlike all others': letters, digits, ``-``, ``_`` and ``:``,
            at most 127 characters.
        backend: there is only one; accepted for existing scripts.
        rank: this worker's number, from 0. Default: the environment variable ``RANK``, and in an
            elastic mesh without that any that is free.
        world_size: how many workers there are. Default: ``WORLD_SIZE``. Without that, an elastic
            mesh.
        rpc_backend_options: threads, timeouts, and where the workers meet. Default:
            `ZmqRpcBackendOptions`, which meets by ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        RendezvousError: the master can't be reached, ranks are missing, a name or a rank is
            there twice, or the workers disagree about the world's size, each within
            ``init_timeout`` seconds. It can be tried again.
        AuthenticationError: the workers have different cluster secrets, or none where they need
            one; see ``ZRPC_SECRET_FILE``.
        RuntimeError: RPC is already initialized, or the name has a form that isn't allowed.
        ValueError: the rank does not fit the world size.
        TypeError: ``backend``, the options, the rank or the world size are of another type.

    Example:
        >>> import zrpc as rpc
        >>> rpc.init_rpc("worker0", rank=0, world_size=1)  # doctest: +SKIP
        >>> rpc.rpc_sync("worker0", max, args=(1, 2))  # doctest: +SKIP
        2
        >>> rpc.shutdown()  # doctest: +SKIP

    See also ``torch.distributed.rpc.init_rpc``.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    options = rpc_backend_options if rpc_backend_options is not None else ZmqRpcBackendOptions()
    if not isinstance(options, ZmqRpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of ZmqRpcBackendOptions, but got "
            f"{type(options).__name__}"
        )
    with _init_lock:
        if find_agent() is not None:
            raise RpcError("RPC is already initialized")
        WorkerInfo(name, 0)  # checks the name before anybody waits
        place = resolve_rank(options.init_method, rank, world_size)
        agent = _join(name, *place, options)
        set_default_agent(agent)
    atexit.unregister(_shutdown_at_exit)
    atexit.register(_shutdown_at_exit)


def _join(
    name: str, rank: int | None, world_size: int | None, options: ZmqRpcBackendOptions
) -> Agent:
    """Connects to the store and starts the agent; anew where the store's host goes away.

    The store of a mesh that just shut down may still answer while its host closes it.
    """
    restarts = restart_count(world_size)
    secret = find_secret()  # an error in there should not have to wait for the others
    timeout = options.init_timeout
    deadline = time.monotonic() + timeout
    lost: StoreLost | None = None
    while True:
        left = deadline - time.monotonic()
        try:
            store = connect_store(options.init_method, rank, world_size, max(left, 0.001))
        except RendezvousError as error:
            if lost is None:
                raise
            raise RendezvousError(
                f"expected the mesh within {timeout:g} s, but the store in which this worker was "
                f"waiting for others was lost ({lost}), and then {error}. Either rank 0 has ended "
                "while the workers were meeting, or it was still the store of an earlier mesh"
            ) from error
        store.set_timeout(timedelta(seconds=timeout))
        try:
            return start_agent(
                name,
                rank=rank,
                world_size=world_size,
                store=store,
                options=options,
                init_method=options.init_method,
                secret=secret,
                restarts=restarts,
            )
        except StoreLost as error:
            if time.monotonic() > deadline:
                raise
            lost = error


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leaves the mesh; afterwards nothing of it is left in this process. Idempotent.

    Args:
        graceful: wait until all workers have called this and nothing is under way: no call,
            nested ones included, and no reference count. In an elastic mesh, wait until this
            worker has nothing under way: no call of its own, no handler. Otherwise it leaves at
            once, and what its peers have under way to it fails.
        timeout: of that wait, in seconds; 0 means none. Workers that die are not waited for.

    Raises:
        RpcTimeoutError: the others did not come in time; this worker has left all the same.
        NotInitializedError: `init_rpc` was never called.

    Where a program ends without it, it is called then: gracefully, or not where an exception
    ends the program.

    See also ``torch.distributed.rpc.shutdown``.
    """
    agent = latest_agent()
    if agent is None:
        raise not_initialized()
    agent.shutdown(graceful, timeout)


def _shutdown_at_exit() -> None:
    agent = default_agent()
    if agent is not None:
        failed = getattr(sys, "last_type", None) is not None
        with contextlib.suppress(KeyboardInterrupt):
            agent.shutdown(graceful=not failed)


def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T:
    """Runs ``func(*args, **kwargs)`` on another worker, and waits for its result.

    Args:
        to: the worker's name, rank or `WorkerInfo`; this worker too.
        func: any callable: a torch operator, a function, a class, a bound method, a lambda or
            closure, a TorchScript function, an ``async def`` function, or one marked with
            `zrpc.functions.async_execution`.
        args: its positional arguments. Tensors are copied when they are sent.
        kwargs: its keyword arguments.
        timeout: seconds; 0 for none. Default: ``rpc_timeout`` of the options. In a handler it
            is never longer than what its own caller still waits.

    Returns:
        What ``func`` returned.

    Raises:
        RpcTimeoutError: it took longer; ``func`` may run on.
        WorkerDied: the worker is gone.
        SerializationError: an argument or the result can't be pickled.
        NotInitializedError: there is no agent.
        ValueError: ``to`` is neither name, rank nor WorkerInfo.
        RpcError: there is no such worker.
        Exception: what ``func`` raised, of its own type, caused by a `RemoteError` with the
            remote traceback.

    May be called from any thread, handlers included.

    Example:
        >>> rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
        tensor([4., 4.])

    See also ``torch.distributed.rpc.rpc_sync``.
    """
    agent = current_agent()
    body = _body(func, args, kwargs)
    return agent.caller.call(agent.membership.find(to), Kind.CALL, body, timeout)  # type: ignore[no-any-return]


def rpc_async(
    to: To,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """Runs ``func(*args, **kwargs)`` on another worker, and returns a `Future` at once.

    Arguments and errors are those of `rpc_sync`; what comes after the sending is raised by the
    future. An error of a future that nobody asks is logged.

    Example:
        >>> futures = [rpc_async("worker1", torch.mul, args=(torch.ones(1), i)) for i in range(3)]
        >>> torch.futures.wait_all(futures)
        [tensor([0.]), tensor([1.]), tensor([2.])]

    See also ``torch.distributed.rpc.rpc_async``.
    """
    agent = current_agent()
    body = _body(func, args, kwargs)
    future: Future[T] = agent.caller.call_async(agent.membership.find(to), Kind.CALL, body, timeout)
    futures = getattr(_collected, "futures", None)
    if futures is not None:
        futures.append(future)
    return future


def remote(
    to: To,
    func: Callable[..., T],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Runs ``func(*args, **kwargs)`` on another worker, and returns an `RRef` at once.

    The result stays at that worker, its owner. Arguments are those of `rpc_sync`. Should the
    function fail, or take longer than ``timeout``, the RRef tells when it is used.

    Example:
        >>> rref = remote("worker1", torch.add, args=(torch.ones(2), 3))
        >>> rref.to_here()
        tensor([4., 4.])

    See also ``torch.distributed.rpc.remote``.
    """
    agent = current_agent()
    body = _body(func, args, kwargs)
    return RRef._create(agent, agent.membership.find(to), body, timeout)


def _body(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not callable(func):
        raise TypeError("function should be callable.")
    return func, tuple(args) if args else (), dict(kwargs) if kwargs else {}


def get_worker_info(worker_name: To | None = None) -> WorkerInfo:
    """The `WorkerInfo` of a worker, or of this one where no name is given.

    Raises:
        NotInitializedError: there is no agent.
        RpcError: there is no such worker.
    """
    return current_agent().get_worker_info(worker_name)


def on_worker_lost(callback: Callable[[WorkerInfo], object]) -> RemovableHandle:
    """Has ``callback(worker_info)`` called for each worker that is gone.

    That is one that died, that left without the others, or that did not answer for longer than
    the option ``heartbeat_timeout``; also one that was lost before this call. A graceful shutdown
    of the mesh loses nobody. A worker that is lost does not come back; one that is started again
    under its name is another one, of the next incarnation.

    Args:
        callback: is called once for each worker, in a thread of the agent's in which it may make
            calls and wait for them. When it is called, calls to that worker have failed already.
            What it raises is logged.

    Returns:
        A handle as torch's hooks have it; ``handle.remove()`` ends the calls.

    Raises:
        NotInitializedError: there is no agent.

    May be called from any thread.

    Example:
        >>> handle = on_worker_lost(lambda worker: print(f"{worker.name} is gone"))
        >>> handle.remove()
    """
    return current_agent().lost.add(callback)


def on_worker_joined(callback: Callable[[WorkerInfo], object]) -> RemovableHandle:
    """Has ``callback(worker_info)`` called for each other worker of the mesh.

    That is for those that are there already, and for those that join later: workers of an elastic
    mesh, and those that ``zrpc launch --max-restarts`` starts again. When it is called, the worker
    can be called by its name.

    Args:
        callback: as for `on_worker_lost`.

    Returns:
        A handle; ``handle.remove()`` ends the calls.

    Raises:
        NotInitializedError: there is no agent.

    May be called from any thread.

    Example:
        >>> names = []
        >>> handle = on_worker_joined(lambda worker: names.append(worker.name))
        >>> handle.remove()
    """
    return current_agent().joined.add(callback)


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds; 0 means none."""
    return _agent_with_timeout().caller.rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    """Sets the default timeout of this worker's calls, in seconds; 0 means none."""
    _agent_with_timeout().caller.rpc_timeout = checked_timeout("rpc_timeout", timeout)


def _agent_with_timeout() -> Agent:
    agent = find_agent()
    if agent is None:
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
            "zrpc.init_rpc)?"
        )
    return agent


def _is_current_rpc_agent_set() -> bool:
    return find_agent() is not None


# Below is what torch has under the same names, for programs that use it there.


def _get_current_rpc_agent() -> Agent:
    return current_agent()


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """What each worker has passed here, by the workers' names; all of them must call it.

    Without a timeout it waits for as long as it takes; not for workers that are gone.
    """
    limit = 0 if timeout == UNSET_RPC_TIMEOUT else timeout
    return current_agent().layer(GatheringLayer).gather(obj, worker_names or None, limit)


def _barrier(worker_names: Iterable[str]) -> None:
    """Waits until all these workers have called it; what goes wrong is logged."""
    try:
        _all_gather(None, worker_names)
    except NotInitializedError:
        raise
    except RuntimeError:
        logger.exception("Failed to complete barrier")


def _wait_all_workers(timeout: float = 0) -> None:
    """Waits until all workers have called it."""
    _all_gather(None, timeout=timeout)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits at its end for all futures that `rpc_async` returned in it, in this thread."""
    _collected.futures = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_collected.futures)
        finally:
            del _collected.futures
