"""What `RRef.rpc_sync`, `rpc_async` and `remote` return: the value's methods, called remotely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["RRefProxy"]


class RRefProxy:
    """Each attribute is a function that calls the value's method of that name at its owner.

    Args:
        call: ``call(timeout, name, args, kwargs)``.
        timeout: of each call, in seconds.
    """

    __slots__ = ("_call", "_timeout")

    def __init__(self, call: Callable[[float, str, Any, Any], Any], timeout: float) -> None:
        self._call = call
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call, timeout = self._call, self._timeout

        def method(*args: Any, **kwargs: Any) -> Any:
            return call(timeout, name, args, kwargs)

        method.__name__ = name
        return method
