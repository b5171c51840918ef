"""Streams: generators that run on other workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias, TypeVar, overload

from zrpc.agent.current import current_agent
from zrpc.api import Args, Kwargs, To, _body
from zrpc.constants import DEFAULT_PREFETCH, UNSET_RPC_TIMEOUT, Seconds
from zrpc.services.groups.group import WorkerGroup
from zrpc.services.streams.service import StreamService
from zrpc.services.streams.stream import Stream

__all__ = ["Stream", "rpc_stream"]

R = TypeVar("R")
# What the function of a stream returns.
Items: TypeAlias = Iterator[R] | AsyncIterator[R]


@overload
def rpc_stream(
    to: To,
    func: Callable[..., Items[R]],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
    prefetch: int = ...,
    deadline: Seconds = ...,
) -> Stream[R]: ...
@overload
def rpc_stream(
    to: WorkerGroup,
    func: Callable[..., Items[R]],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
    prefetch: int = ...,
    deadline: Seconds = ...,
) -> Stream[tuple[int, R]]: ...
@overload
def rpc_stream(
    to: WorkerGroup,
    func: Callable[..., R],
    args: Args = ...,
    kwargs: Kwargs = ...,
    timeout: Seconds = ...,
    prefetch: int = ...,
    deadline: Seconds = ...,
) -> Stream[R]: ...
def rpc_stream(
    to: To | WorkerGroup,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    timeout: Seconds = UNSET_RPC_TIMEOUT,
    prefetch: int = DEFAULT_PREFETCH,
    deadline: Seconds = 0,
) -> Stream[Any]:
    """Runs a generator on another worker, and returns a `Stream` of its items at once.

    The generator runs ahead of its reader, by at most ``prefetch`` items and the bytes of the
    option ``max_bytes_in_flight``. Then it rests, without a thread, until items are read. Items are
    sent as results are: tensors of workers on one host by shared memory.

    A group's stream has the items of all members as they come, as pairs: the member's place, and
    the item. Each member has its own ``prefetch`` and ``timeout``. If some fail, the items of the
    others still come, and then a `GroupError` with the errors by place. With `zrpc.share` each
    shared item is one call, and the pairs have its place in the items. Its function may also be no
    generator: then the stream has the results themselves, in the order in which they are ready.

    Args:
        to: the worker's name, rank or `WorkerInfo`; it may be this worker. Or a group of workers,
            see `zrpc.group`.
        func: a function that returns a generator, or an ``async def`` function with ``yield``.
        args: its positional arguments.
        kwargs: its keyword arguments.
        timeout: seconds that an item may take, while the reader waits for it; 0 for no limit.
            Default: ``rpc_timeout`` of the options.
        prefetch: the number of items that the generator may be ahead of its reader, at least 1.
            The default lets small items be sent by the hundred.
        deadline: seconds for the whole stream; 0 for no limit. In a handler it is never longer than
            the handler's own caller still waits.

    Raises:
        OptionError: ``prefetch`` is less than 1.
        ValueError: an argument has not as many values as a group has members.
        GroupError: by the stream, at its end: some members of a group have failed.
        Exception: as `rpc_async`; the stream raises the errors that come after the call is sent.

    May be called from any thread, handlers included.

    Example:
        >>> def count(n):
        ...     for number in range(n):
        ...         yield number
        >>> for number in rpc_stream("worker1", count, args=(3,)):
        ...     print(number)
        0
        1
        2
        >>> import zrpc
        >>> sorted(rpc_stream(zrpc.group("worker*"), count, args=(zrpc.each([1, 0, 2]),)))
        [(0, 0), (2, 0), (2, 1)]
        >>> sorted(rpc_stream(zrpc.group("worker*"), abs, args=(zrpc.share([-1, 2, -3, 4]),)))
        [1, 2, 3, 4]
    """
    agent = current_agent()
    body = _body(func, args, kwargs)
    if isinstance(to, WorkerGroup):
        return to.stream(body, timeout, prefetch, deadline)
    service = agent.service(StreamService)
    return service.open(agent.membership.find(to), body, timeout, prefetch, deadline)
