"""Decorators that tell the callee how to run a function."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar, overload

from zrpc.batch_values import Call, columns, rows
from zrpc.constants import Seconds
from zrpc.errors import OptionError

__all__ = ["async_execution", "batched"]

_F = TypeVar("_F", bound=Callable[..., Any])
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)

# torch sets this attribute; programs that test for it find it here too.
ASYNC_MARK = "_wrapped_async_rpc_function"
# The attribute of a function whose calls are not simply run: see `Deferral`.
DEFERRAL = "_zrpc_deferral"
_MAX_WAIT_SECONDS = 3600.0


def async_execution(fn: _F) -> _F:
    """Marks a function whose calls are answered when the Future that it returns completes.

    The callee sends the Future's value then, and holds no thread until then. With
    ``@staticmethod`` and ``@classmethod`` it must be the inner decorator, with
    ``@torch.jit.script`` the outer one.

    Args:
        fn: a function that returns a ``torch.futures.Future``.

    Returns:
        The same function, marked.

    Example:
        >>> import zrpc
        >>> @zrpc.functions.async_execution
        ... def add_on(to, x, y, z):
        ...     return zrpc.rpc_async(to, torch.add, (x, y)).then(lambda f: f.wait() + z)

    The caller gets a RuntimeError if the function returns something else. An ``async def``
    function needs no mark.

    See also ``torch.distributed.rpc.functions.async_execution``.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # A script has no name, but the function it was made from has: the callee finds the wrapper by
    # that name.
    functools.update_wrapper(wrapper, getattr(fn, "_torchdynamo_inline", fn))
    wrapper.__wrapped__ = fn  # type: ignore[attr-defined]
    setattr(wrapper, ASYNC_MARK, fn)
    return wrapper  # type: ignore[return-value]


class Deferral:
    """Marks a function whose calls a service of the callee takes over, by its subclass.

    The service has a function for that subclass, see `zrpc.agent.service.Service.deferrals`. A
    function is marked by an attribute with the name `DEFERRAL`.
    """

    __slots__ = ()


class Batching(Deferral):
    """How the calls of a function become batches; see `batched`.

    Attributes:
        fn: the function, which takes and returns lists.
        name: what errors call it.
        token: the same for all copies of the function, if it is sent by value.
    """

    __slots__ = ("fn", "max_size", "max_wait", "name", "stack", "token")

    def __init__(self, fn: Callable[..., Any], max_size: int, max_wait: float, stack: bool) -> None:
        self.fn = fn
        # An object that can be called has none, nor has a partial function.
        self.name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.max_size = max_size
        self.max_wait = max_wait
        self.stack = stack
        self.token = uuid.uuid4().hex

    def receiver(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the object (or class) that begins the arguments of a method's call, as a tuple.

        It is not one of the arguments that become lists. Empty for a function.
        """
        if args and (name := getattr(self.fn, "__name__", None)):
            first = args[0]
            for cls in (first if isinstance(first, type) else type(first)).__mro__:
                found = vars(cls).get(name)
                found = getattr(found, "__func__", found)
                if getattr(found, DEFERRAL, None) is self:
                    return args[:1]
        return ()

    def of_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Returns the arguments of a batch of one call."""
        receiver = self.receiver(args)
        return columns([(args[len(receiver) :], kwargs)], self.stack, receiver)

    def only(self, result: Any) -> Any:
        """Returns the result of the only call of a batch, or raises it if it is an exception."""
        (row,) = rows(result, 1, self.stack, self.name)
        if isinstance(row, BaseException):
            raise row
        return row


class _Later(Protocol[_R_co]):
    """A coroutine function. With Any in its type, mypy would not choose an overload of a call."""

    async def __call__(self, *args: object, **kwargs: object) -> _R_co: ...


class _OfLists(Protocol):
    """The decorator for functions that return lists."""

    @overload
    def __call__(self, fn: Callable[..., Coroutine[Any, Any, list[_R]]], /) -> _Later[_R]: ...
    @overload
    def __call__(self, fn: Callable[..., list[_R]], /) -> Callable[..., _R]: ...


@overload
def batched(fn: Callable[..., Coroutine[Any, Any, list[_R]]], /) -> _Later[_R]: ...
@overload
def batched(fn: Callable[..., list[_R]], /) -> Callable[..., _R]: ...
@overload
def batched(
    *, max_size: int = ..., max_wait: Seconds = ..., stack: Literal[False] = ...
) -> _OfLists: ...
@overload
def batched(
    *, max_size: int = ..., max_wait: Seconds = ..., stack: bool
) -> Callable[[_F], Callable[..., Any]]: ...
def batched(
    fn: Any = None, /, *, max_size: int = 32, max_wait: Seconds = 0.002, stack: bool = False
) -> Any:
    """Makes one call of a function out of the calls of other workers that arrive together.

    The function gets a list for each argument, with one item for each call, and returns a list of
    results in the same order. Each caller passes and gets single values, and has its own result,
    error and deadline. A call that waits for its batch takes no thread. If it is cancelled, or its
    caller dies, it leaves the batch.

    A batch begins ``max_wait`` seconds after its first call arrived, or once it has ``max_size``
    calls. While all threads of the worker are busy, it goes on to grow. Batches of a function may
    run at the same time, as other calls.

    Calls that pass different numbers of arguments, or different keyword arguments, are in
    different batches. So are calls of different autograd contexts: batches carry gradients. The
    decorator works for ``async def`` functions and for methods too. With ``@classmethod`` and
    ``@staticmethod`` it must be the inner decorator.

    In a batch, `zrpc.current_call` stands for all its calls: it is cancelled once nobody waits for
    any of them, and has the latest of their deadlines.

    If the worker calls the function itself, not by RPC, that is a batch of one.

    Args:
        fn: the function, if it is decorated without arguments.
        max_size: the most calls in one batch.
        max_wait: the longest time in seconds that a call waits for others.
        stack: whether tensors are stacked, in place of lists of them. Each tensor in an argument,
            which may be nested in tuples, lists and dicts, becomes one tensor with a new first
            dimension; other values become lists. Calls whose tensors differ in shape or type are
            in different batches. The result is taken apart in the same way: of each tensor, each
            call gets its row; of a list without tensors, its item.

    Returns:
        The function for single values.

    Raises:
        OptionError: ``max_size`` or ``max_wait`` is not possible.

    An exception in the returned list is raised by the call at its place, and by no other one. If
    the function raises, all calls of the batch do. If it returns anything but a list of the right
    length, they all raise a `zrpc.RpcError`.

    Example:
        >>> @batched(max_size=64, max_wait=0.001)
        ... def double(numbers):
        ...     return [2 * number for number in numbers]
        >>> [future.wait() for future in [rpc_async("worker1", double, (n,)) for n in range(3)]]
        [0, 2, 4]
        >>> double(21)
        42
    """
    if fn is None:
        return functools.partial(_batched, max_size=max_size, max_wait=max_wait, stack=stack)
    return _batched(fn, max_size=max_size, max_wait=max_wait, stack=stack)


def _batched(fn: Any, *, max_size: int, max_wait: Seconds, stack: bool) -> Any:
    if not callable(fn):
        raise OptionError(f"expected a function to batch, found {fn!r}: pass options by keyword")
    if not isinstance(max_size, int) or max_size < 1:
        raise OptionError(f"max_size must be 1 or more calls, but got {max_size!r}")
    if isinstance(max_wait, timedelta):
        max_wait = max_wait.total_seconds()
    if not isinstance(max_wait, (int, float)) or not 0 <= max_wait <= _MAX_WAIT_SECONDS:
        raise OptionError(
            f"max_wait must be 0 to {_MAX_WAIT_SECONDS:g} seconds, but got {max_wait!r}"
        )
    batching = Batching(fn, max_size, max_wait, stack)
    wrapper: Any
    if inspect.iscoroutinefunction(fn):

        async def of_coroutine(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = batching.of_one(args, kwargs)
            return batching.only(await fn(*args, **kwargs))

        wrapper = of_coroutine
    else:

        def of_function(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = batching.of_one(args, kwargs)
            return batching.only(fn(*args, **kwargs))

        wrapper = of_function
    functools.update_wrapper(wrapper, fn)
    setattr(wrapper, DEFERRAL, batching)
    return wrapper
