"""The name of the function that a request asks for, read without unpickling it."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any

from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

__all__ = ["function_of", "kind_name", "readable"]

# The name stands at the beginning; so many bytes are looked at.
_LOOKED_AT = 512
_WITH_FUNCTION = (Kind.CALL, Kind.REMOTE, Kind.METHOD)
# What pickles begin with that hold something else than the name of a module's function.
_NO_FUNCTIONS = ("builtins.getattr", "cloudpickle.", "copyreg.", "zrpc.", "functools.partial")


def function_of(request: Message) -> str:
    """The function's or method's name; empty where it travels by value, or there is none."""
    if request.kind not in _WITH_FUNCTION:
        return ""
    try:
        return _first_name(bytes(request.body[:_LOOKED_AT]))
    except Exception:  # whatever a peer has sent, it is only looked at
        return ""


def readable(name: object) -> str:
    """A function's name as people know it."""
    return str(name).replace("_VariableFunctionsClass.", "torch.")


def kind_name(kind: int) -> str:
    """The name of a kind of message."""
    try:
        return Kind(kind).name
    except ValueError:
        return f"kind {kind}"


def _first_name(pickle: bytes) -> str:
    operations = _operations(pickle)
    operation, module = next(operations)
    if "UNICODE" not in operation:
        return ""
    (_, name), (operation, _) = next(operations), next(operations)
    if operation != "STACK_GLOBAL":
        return str(module)  # a method's name, and then its arguments
    return "" if f"{module}.{name}".startswith(_NO_FUNCTIONS) else readable(name)


def _operations(pickle: bytes) -> Iterator[tuple[str, Any]]:
    for operation, argument, _ in pickletools.genops(pickle):
        if operation.name not in ("PROTO", "FRAME", "MEMOIZE", "MARK"):
            yield operation.name, argument
