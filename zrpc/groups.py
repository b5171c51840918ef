"""Groups: calls of several workers, or of several objects, at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

from zrpc.agent.current import current_agent
from zrpc.constants import UNSET_RPC_TIMEOUT, Seconds
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.groups.arguments import Each, Share, Split
from zrpc.services.groups.group import RRefGroup, WorkerGroup, gather
from zrpc.services.rref.rref import RRef

__all__ = ["each", "group", "share", "split"]

T = TypeVar("T")


@overload
def group(
    members: str | Iterable[str | int | WorkerInfo],
    size: int | None = ...,
    timeout: Seconds = ...,
    live: bool = ...,
) -> WorkerGroup: ...
@overload
def group(members: Iterable[RRef[T]]) -> RRefGroup[T]: ...
def group(
    members: str | Iterable[Any],
    size: int | None = None,
    timeout: Seconds = UNSET_RPC_TIMEOUT,
    live: bool = False,
) -> Any:
    """Returns a group: a sequence of workers, or of RRefs, that is called as one.

    Args:
        members: a pattern of names, as in a shell, such as ``"rollout*"``; it may match this
            worker. Or the workers, by name, rank or `WorkerInfo`; or RRefs. A worker may be in it
            twice.
        size: the least number of workers that must match the pattern: waits until they are in the
            mesh. Default: 1, without a wait.
        timeout: how long to wait for them, in seconds; 0 means no limit. Default: the default
            timeout of calls.
        live: whether the pattern is looked up at each call. By default the names are fixed here,
            and after a restart the worker that has the name is called.

    Returns:
        A sequence: it has a length, indices, slices and ``in``. Each of `rpc_sync`, `rpc_async` and
        `remote` takes a group of workers. A group of RRefs has the methods of an RRef that return
        proxies.

    Raises:
        RpcError: there is no such worker.
        RpcTimeoutError: fewer than ``size`` workers were there in time.
        ValueError: there are no members, or ``size`` or ``live`` was given without a pattern.
        TypeError: a member is neither a worker nor an RRef, or there are both; or a single one was
            given in place of a list.
        NotInitializedError: this process is not a worker.

    May be called from any thread.

    Example:
        >>> workers = group("worker*")
        >>> len(workers), workers[0], "worker2" in workers[1:]
        (3, 'worker0', True)
        >>> rpc_sync(workers, pow, args=(each([1, 2, 3]), 2))
        [1, 4, 9]
    """
    return gather(current_agent(), members, size, timeout, live)


def split(value: Any, dim: int = 0) -> Any:
    """Marks an argument of a group's call: each member gets a part of it.

    A tensor is divided by ``torch.tensor_split``, and a list or another sequence in the same way.
    In a structure (a dictionary, a tuple that has tensors in it, and whatever torch's pytrees know)
    each tensor and each list is divided, and the rest goes to all. If there are more members than
    elements, some of them get an empty part.

    Args:
        value: a tensor, a sequence, or a structure of these.
        dim: the dimension along which tensors are divided.

    Returns:
        A mark for ``args`` and ``kwargs``, also inside of containers. The call raises ValueError or
        TypeError if the value can't be divided, before anything is sent.

    Example:
        >>> rpc_sync(group("worker*"), torch.sum, args=(split(torch.arange(6)),))
        [tensor(1), tensor(5), tensor(9)]
    """
    return Split(value, dim)


def each(values: Iterable[Any]) -> Any:
    """Marks an argument of a group's call: each member gets one of these values, in order.

    A value that occurs several times is packed once.

    Args:
        values: as many as the group has members.

    Returns:
        A mark, as `split` returns it. The call raises ValueError if their number is wrong, before
        anything is sent.

    Example:
        >>> rpc_sync(group("worker*"), abs, args=(each([-1, 2, -3]),))
        [1, 2, 3]
    """
    return Each(values)


def share(items: Iterable[Any]) -> Any:
    """Marks an argument of a group's call: each item goes to a member that is free.

    There is one result for each item, in their order. Each member has one item at a time. An item
    is copied when a member gets it: don't change its tensors before the call is done.

    Args:
        items: the items; there may be more than members, or fewer.

    Returns:
        A mark, as `split` returns it; it can be used once in a call, and not with the others.

    Example:
        >>> rpc_sync(group("worker*"), pow, args=(share(range(5)), 2))
        [0, 1, 4, 9, 16]
    """
    return Share(items)
