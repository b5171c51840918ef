"""The proxies of RRefs: the methods of values, called from afar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from zrpc.constants import Seconds
from zrpc.services.rref.value import ITSELF

R = TypeVar("R")

# The special methods that a program calls through a proxy: those of Python's operators, containers,
# numbers and context managers. Python, torch and numpy ask any object for others.
_NAMES = """
    call len length_hint contains getitem setitem delitem missing reversed iter next aiter anext
    await enter exit aenter aexit bool int float complex index bytes round trunc floor ceil neg
    pos abs invert add radd iadd sub rsub isub mul rmul imul matmul rmatmul imatmul truediv
    rtruediv itruediv floordiv rfloordiv ifloordiv mod rmod imod divmod rdivmod pow rpow ipow
    lshift rlshift ilshift rshift rrshift irshift and rand iand or ror ior xor rxor ixor
"""
_SPECIAL = frozenset(f"__{name}__" for name in _NAMES.split())


class Proxy(Generic[R]):
    """Each attribute is a function that calls the value's method of that name at its owner.

    To call the proxy is to call the value. Copies of a proxy are the proxy itself. One that is sent
    arrives as a proxy of the same value.

    ``ask`` is given the name, the arguments and the keyword arguments as one, and the timeout.
    """

    # torch's compiler expects a dictionary of an object that has any attribute.
    __slots__ = ("__dict__", "__weakref__", "_ask", "_timeout")

    def __init__(self, ask: Callable[[Any, Seconds], R], timeout: Seconds) -> None:
        self._ask = ask
        self._timeout = timeout

    def __call__(self, /, *args: Any, **kwargs: Any) -> R:
        """Calls the value itself."""
        return self._ask((ITSELF, args, kwargs), self._timeout)

    def __getattr__(self, name: str) -> Callable[..., R]:
        if name[:2] == "__" and name[-2:] == "__" and name not in _SPECIAL:
            raise AttributeError(
                f"the proxy of an RRef has no attribute {name!r}: of special methods, it has only "
                "those of operators, containers and context managers"
            )
        method: RemoteMethod = RemoteMethod(_call, self._ask, self._timeout, name)
        method.__name__ = name
        return method

    def __copy__(self) -> Proxy[R]:
        return self

    def __deepcopy__(self, memo: object) -> Proxy[R]:
        return self

    def __reduce__(self) -> Any:
        return Proxy, (self._ask, self._timeout)


def _call(
    ask: Callable[[Any, Seconds], R], timeout: Seconds, name: str, /, *args: Any, **kw: Any
) -> R:
    return ask((name, args, kw), timeout)


class RemoteMethod(partial[Any]):
    """A method of a value, which the owner calls; also what stands for a field, which can't be had.

    It is a `functools.partial`, and so takes no more steps than a function would.
    """

    __name__: str

    def __repr__(self) -> str:
        name = self.__name__
        rref = getattr(self.args[0], "__self__", "an RRef")
        return (
            f"<remote method {name!r} of {rref!r}: call it, as in rref.rpc_sync().{name}(). If it "
            "is a field: zrpc.rpc_sync(rref.owner(), lambda rref: "
            f"rref.local_value().{name}, args=(rref,))>"
        )

    def __getattr__(self, name: str) -> Any:
        if name[:1] != "_":
            own = self.__name__
            raise AttributeError(
                f"the method {own!r} of an RRef has no attribute {name!r}: call it, as in "
                f"rref.rpc_sync().{own}(...), or rref.rpc_async().{own}(...) for a future"
            )
        raise AttributeError(f"a method of an RRef has no attribute {name!r}")
