"""The functions that programs call: a thin layer over the current agent."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.distributed import is_available as is_distributed_available

from zrpc.agent.current import (
    agent_that_is_set,
    current_agent,
    default_agent,
    find_agent,
    latest_agent,
    set_default_agent,
)
from zrpc.backend_registry import BackendType
from zrpc.bootstrap import join_by_init_method
from zrpc.calls.future import Future
from zrpc.calls.future_group import wait_all
from zrpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, Seconds
from zrpc.errors import RpcError, not_initialized
from zrpc.membership.init_method import resolve_name, resolve_rank
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import RpcBackendOptions, checked_options, checked_timeout
from zrpc.runtime.forks import free_in_child
from zrpc.services.groups.future import GroupFuture
from zrpc.services.groups.group import RRefGroup, WorkerGroup
from zrpc.services.names.claims import make_named
from zrpc.services.rref.rref import RRef
from zrpc.torch_collectives import _all_gather as _all_gather
from zrpc.torch_collectives import _barrier as _barrier
from zrpc.torch_collectives import _wait_all_workers as _wait_all_workers
from zrpc.wire.kind import Kind

T = TypeVar("T")
To = str | int | WorkerInfo
Group = WorkerGroup
Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None
Function = Callable[..., T]
AsyncFunction = Callable[..., Coroutine[Any, Any, T] | torch.futures.Future[T]]

# Held by init_rpc: one at a time.
_init_lock = free_in_child(threading.Lock())
# The futures of this thread's `_wait_all`, if it is inside of one.
_collected = threading.local()


def is_available() -> bool:
    """Returns whether this build of torch has what zrpc needs of ``torch.distributed``.

    Example:
        >>> is_available()
        True
    """
    return is_distributed_available()


def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Joins this process to a mesh of workers; returns when all of them have joined.

    Without a world size the mesh is *elastic*: workers join and leave it while it runs. Then it
    returns when the current members know this worker.

    Args:
        name: this worker's name, unique in the mesh: letters, digits, ``-``, ``_`` and ``:``, at
            most 127 characters. Default: the environment variable ``ZRPC_WORKER_NAME``, which
            ``zrpc launch`` sets; without it, ``worker`` and the rank.
        backend: there is only one; accepted for existing scripts.
        rank: this worker's number, from 0. Default: the environment variable ``RANK``, or that of
            Open MPI, Slurm, PMI or a Kubernetes indexed Job; ``zrpc env`` shows it. An elastic
            mesh picks any free rank if none is set.
        world_size: the number of workers. Default: ``WORLD_SIZE``, or that engine's variable.
            Without either, or if ``WORLD_SIZE`` is empty, the mesh is elastic.
        rpc_backend_options: threads, timeouts, and where the workers meet. Default:
            `ZmqRpcBackendOptions`, which uses ``MASTER_ADDR`` and ``MASTER_PORT``, or what that
            engine says.

    Raises:
        RendezvousError: within ``init_timeout`` seconds, the master can't be reached, ranks are
            missing, two workers have the same name or rank, or the workers disagree about the world
            size. It can be tried again. Or neither a name nor a rank can be found.
        AuthenticationError: the workers have different cluster secrets, or none when they need
            one; see ``ZRPC_SECRET_FILE``.
        RuntimeError: RPC is already initialized, or the name has a form that isn't allowed.
        ValueError: the rank does not fit the world size.
        TypeError: ``backend``, the options, the rank or the world size have a wrong type.

    Example:
        >>> import zrpc as rpc
        >>> rpc.init_rpc()  # doctest: +SKIP
        >>> rpc.rpc_sync("worker0", max, args=(1, 2))  # doctest: +SKIP
        2
        >>> rpc.shutdown()  # doctest: +SKIP

    See also ``torch.distributed.rpc.init_rpc``.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    options = checked_options(rpc_backend_options)
    with _init_lock:
        if find_agent() is not None:
            raise RpcError("RPC is already initialized")
        if name is not None:
            WorkerInfo(name, 0)  # checks the name before any worker waits
        found_rank, size = resolve_rank(options.init_method, rank, world_size)
        found_name = resolve_name(name, found_rank, size, options.init_method)
        agent = join_by_init_method(found_name, found_rank, size, options)
        set_default_agent(agent)
    atexit.unregister(_shutdown_at_exit)
    atexit.register(_shutdown_at_exit)


def shutdown(graceful: bool = True, timeout: Seconds = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the mesh; afterwards nothing of it is left in this process. Idempotent.

    Args:
        graceful: whether to wait until all workers have called this and nothing is in progress: no
            call, nested ones included, and no reference count. In an elastic mesh it waits until
            this worker has nothing in progress: no call of its own, no handler. If false, the
            worker leaves at once, and its peers' outstanding calls to it fail.
        timeout: limit of that wait in seconds; 0 means no limit. Workers that die are not waited
            for.

    Raises:
        RpcTimeoutError: the others did not call it in time, or calls are still in progress; this
            worker has left nevertheless.
        NotInitializedError: `init_rpc` was never called.

    If a program ends without calling it, it is called then: gracefully, unless an exception ends
    the program.

    Once all workers have called it gracefully, only handlers and callbacks may call, and for some
    seconds chains of callbacks. A call of another thread raises `NotInitializedError`. Threads that
    a handler has started may call until it has answered.

    Example:
        >>> shutdown(graceful=False)

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


@overload
def rpc_sync(
    to: To, func: AsyncFunction[T], args: Args = ..., kwargs: Kwargs = ..., timeout: Seconds = ...
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: Seconds = ...
) -> T: ...
@overload
def rpc_sync(
    to: Group,
    func: AsyncFunction[T],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
) -> list[T]: ...
@overload
def rpc_sync(
    to: Group, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: Seconds = ...
) -> list[T]: ...
def rpc_sync(
    to: To | Group,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: Seconds = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs ``func(*args, **kwargs)`` on another worker, and waits for its result.

    Args:
        to: the worker's name, rank or `WorkerInfo`; it may be this worker. Or a group of workers,
            see `zrpc.group`.
        func: any callable: a torch operator, a function, a class, a bound method, a lambda or
            closure, a TorchScript function, an ``async def`` function, or one marked with
            `zrpc.functions.async_execution`.
        args: its positional arguments. Tensors are copied when they are sent.
        kwargs: its keyword arguments.
        timeout: seconds; 0 for no limit. Default: ``rpc_timeout`` of the options. In a handler it
            is never longer than the handler's own caller still waits. A negative one is a deadline
            that has passed, except -1, the default: the call fails at once.

    Returns:
        What ``func`` returned; for a group, a list of that in the group's order.

    Raises:
        RpcTimeoutError: it took longer; ``func`` may still be running.
        WorkerDied: the worker is gone.
        SerializationError: an argument or the result can't be pickled.
        NotInitializedError: this process is not a worker.
        ValueError: ``to`` is neither name, rank nor WorkerInfo.
        RpcError: there is no such worker.
        GroupError: some members of a group have failed.
        Exception: the error that ``func`` raised, with its own type; its cause is a `RemoteError`
            with the remote traceback.

    May be called from any thread, handlers included.

    Example:
        >>> rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
        tensor([4., 4.])

    See also ``torch.distributed.rpc.rpc_sync``.
    """
    agent = current_agent()
    body = _body(func, args, kwargs)
    if isinstance(to, Group):
        return to.call(body, timeout)
    return agent.caller.call(agent.membership.find(to), Kind.CALL, body, timeout)


@overload
def rpc_async(
    to: To, func: AsyncFunction[T], args: Args = ..., kwargs: Kwargs = ..., timeout: Seconds = ...
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: Seconds = ...
) -> Future[T]: ...
@overload
def rpc_async(
    to: Group,
    func: AsyncFunction[T],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
) -> GroupFuture[T]: ...
@overload
def rpc_async(
    to: Group, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: Seconds = ...
) -> GroupFuture[T]: ...
def rpc_async(
    to: To | Group,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: Seconds = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Runs ``func(*args, **kwargs)`` on another worker, and returns a `Future`.

    It returns once the call is sent, which may wait until there is room for it; see the option
    ``max_bytes_in_flight``.

    Arguments and errors are those of `rpc_sync`; the future raises the errors that come after the
    call is sent. If nobody asks the future for its value, its error is logged. For a group, it is a
    future of the list, and its ``parts`` are one future for each member.

    Example:
        >>> futures = [rpc_async("worker1", torch.mul, args=(torch.ones(1), i)) for i in range(3)]
        >>> wait_all(futures)
        [tensor([0.]), tensor([1.]), tensor([2.])]

    See also ``torch.distributed.rpc.rpc_async``.
    """
    agent = current_agent()
    body = _body(func, args, kwargs)
    future: Future[Any]
    if isinstance(to, Group):
        future = to.call_async(body, timeout)
    else:
        future = agent.caller.call_async(agent.membership.find(to), Kind.CALL, body, timeout)
    futures = getattr(_collected, "futures", None)
    if futures is not None:
        futures.append(future)
    return future


@overload
def remote(
    to: To,
    func: AsyncFunction[T],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
    *,
    name: str | None = ...,
    exist_ok: bool = ...,
) -> RRef[T]: ...
@overload
def remote(
    to: To,
    func: Function[T],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
    *,
    name: str | None = ...,
    exist_ok: bool = ...,
) -> RRef[T]: ...
@overload
def remote(
    to: Group,
    func: AsyncFunction[T],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
) -> RRefGroup[T]: ...
@overload
def remote(
    to: Group, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: Seconds = ...
) -> RRefGroup[T]: ...
def remote(
    to: To | Group,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: Seconds = UNSET_RPC_TIMEOUT,
    *,
    name: str | None = None,
    exist_ok: bool = False,
) -> Any:
    """Runs ``func(*args, **kwargs)`` on another worker, and returns an `RRef` at once.

    The result stays on that worker, its owner. Arguments are those of `rpc_sync`. If the function
    fails, or takes longer than ``timeout``, you get the error when you use the RRef. For a group,
    it returns a group of RRefs.

    With a ``name``, it first waits until the result has that name, which is unique in the mesh.
    `zrpc.get_actor` finds it on any worker. The name keeps the result alive, until it is stopped,
    or its owner leaves or dies. If the function fails, the name is free again. If the name is
    taken, RpcError says by what; with ``exist_ok`` the RRef of that is returned instead, and the
    owner, function and arguments are ignored. See :doc:`/how-to/actors`.

    Example:
        >>> rref = remote("worker1", torch.add, args=(torch.ones(2), 3))
        >>> rref.to_here()
        tensor([4., 4.])
        >>> remote("worker1", dict, name="settings").is_owner()
        False

    See also ``torch.distributed.rpc.remote``.
    """
    agent = current_agent()
    body = _body(func, args, kwargs)
    if name is not None:
        if isinstance(to, Group):
            raise ValueError(
                f"expected one worker for the name {name!r}, got a group: make each member's actor "
                "by its own call of remote, with its own name"
            )
        return make_named(agent, agent.membership.find(to), body, timeout, name, exist_ok)
    if exist_ok:
        raise ValueError("expected a name with exist_ok=True, got none: pass name=...")
    if isinstance(to, Group):
        return to.create(body, timeout)
    return RRef._create(agent, agent.membership.find(to), body, timeout)


def _body(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not callable(func):
        raise TypeError(f"function should be callable. Got {func!r} of type {type(func).__name__}")
    try:
        return func, tuple(args) if args else (), dict(kwargs) if kwargs else {}
    except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor's truth value
        raise TypeError(
            "expected args to be a tuple and kwargs to be a dict, got args of type "
            f"{type(args).__name__} and kwargs of type {type(kwargs).__name__} ({error}): for one "
            "argument, write args=(x,)"
        ) from error


def get_worker_info(worker_name: To | None = None) -> WorkerInfo:
    """Returns the `WorkerInfo` of a worker, or of this one if no name is given.

    Raises:
        NotInitializedError: this process is not a worker.
        RpcError: there is no such worker.

    Example:
        >>> get_worker_info(), get_worker_info("worker2").rank
        (WorkerInfo(id=0, name=worker0), 2)
    """
    return current_agent().get_worker_info(worker_name)


def get_rpc_timeout() -> float:
    """Returns the default timeout of calls, in seconds; 0 means no limit.

    Example:
        >>> get_rpc_timeout()
        60.0
    """
    return agent_that_is_set().caller.rpc_timeout


def _set_rpc_timeout(timeout: Seconds) -> None:
    """Sets the default timeout of this worker's calls, in seconds; 0 means no limit."""
    agent_that_is_set().caller.rpc_timeout = checked_timeout("rpc_timeout", timeout)


def _is_current_rpc_agent_set() -> bool:
    return find_agent() is not None


# The functions below have torch's private names, for programs that use them there.


_get_current_rpc_agent = current_agent


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits at the end of the block for all futures that `rpc_async` returned in this thread."""
    _collected.futures = []
    try:
        yield
    finally:
        try:
            wait_all(_collected.futures)
        finally:
            del _collected.futures
