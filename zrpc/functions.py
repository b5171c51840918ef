"""Decorators that tell the callee how to run a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["async_execution"]

_F = TypeVar("_F", bound=Callable[..., Any])

# torch sets this attribute; programs that test for it find it here too.
_ASYNC_MARK = "_wrapped_async_rpc_function"


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
    setattr(wrapper, _ASYNC_MARK, fn)
    return wrapper  # type: ignore[return-value]


def is_async_execution(fn: Any) -> bool:
    """Returns whether `async_execution` has marked ``fn``."""
    return hasattr(fn, _ASYNC_MARK)
