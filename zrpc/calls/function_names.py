"""The name of what a request asks for: of a function, or in a message that is not unpickled."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import sys
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch.jit import ScriptFunction

from zrpc.runtime.interrupts import raise_if_of_handler
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

# The name stands at the beginning of the pickle.
_READ_BYTES = 512
_METHOD_BYTES = 13 + 255
_WITH_FUNCTION = (Kind.CALL, Kind.REMOTE, Kind.METHOD, Kind.STREAM)
_LABELS: dict[int, str] = {
    Kind.REMOTE: "rpc_remote",
    Kind.FETCH: "to_here",
    Kind.METHOD: "rref",
    Kind.STREAM: "rpc_stream",
}
# Pickles that begin with these names don't hold the name of a module's function.
_NO_FUNCTIONS = ("builtins.getattr", "cloudpickle.", "copyreg.", "zrpc.", "functools.partial")

# The names of C functions that belong to a module.
_builtin_names: dict[BuiltinFunctionType, str] = {}


def name_of(body: Any) -> str:
    """Returns what to call a request in messages to people: its function's or method's name.

    Not the function itself, which may hold much: a bound method its object, a closure its cells.

    Args:
        body: what is pickled: the function or the method's name first, if there is one.
    """
    what: Any = body[0] if type(body) is tuple and body else ""
    if type(what) is FunctionType:
        return what.__qualname__
    if type(what) is str:
        return what
    return "" if type(what) is tuple else name_of_function(what)  # a part of a backward pass


def name_of_function(function: Any) -> str:
    """Returns what to call a function, or another object that can be called."""
    if type(function) is BuiltinFunctionType:
        return _name_of_builtin(function)
    if type(function) is ScriptFunction:  # all have the `__qualname__` of their class
        return str(function.name)
    try:
        name = function.__qualname__
    except Exception as error:  # of an object that can be called
        raise_if_of_handler(error)
        name = None
    return name if type(name) is str else type(function).__qualname__


def _name_of_builtin(function: BuiltinFunctionType) -> str:
    """Returns the name of a C function, such as an operator of torch, which has to make it up."""
    name = _builtin_names.get(function)
    if name is None:
        name = function.__qualname__
        # Not of a method, which would keep its object alive.
        module = sys.modules.get(function.__module__)
        if getattr(module, function.__name__, None) is function:
            _builtin_names[function] = name
    return name


def handler_name(request: Message) -> str:
    """Returns the name of what a request asks for, or nothing if it is not known.

    It is the function's own name once that is unpickled, and the one in the message before.
    """
    function = request.scope.function
    if type(function) is MethodType:
        function = function.__func__
    if type(function) is ScriptFunction:
        return readable(str(function.name))
    try:
        # No `__getattr__` of a user's object: the I/O thread asks, and might have to wait in it.
        name = object.__getattribute__(function, "__qualname__")
    except Exception:  # of an object that can be called
        name = None
    return readable(name) if type(name) is str else function_of(request)


def function_of(request: Message) -> str:
    """Returns the name of the function or method in a message.

    It is empty if the function travels by value, or the request has none.
    """
    if request.kind not in _WITH_FUNCTION:
        return ""
    with contextlib.suppress(Exception):  # a peer may have sent anything
        return _first_name(bytes(request.body[:_READ_BYTES]))
    return ""


def method_in(body: Any) -> str:
    """Returns the name of the method in the body of a message, or nothing if there is none.

    The name is the first thing in the pickle. For messages whose method decides how they run.
    """
    head = bytes(body[:_METHOD_BYTES])
    if head[:3] == b"\x80\x05\x95" and head[11:12] == pickle.SHORT_BINUNICODE:
        return head[13 : 13 + head[12]].decode(errors="replace")
    with contextlib.suppress(Exception):  # a peer may have sent anything
        return _first_name(head)
    return ""


def readable(name: object) -> str:
    """Returns a function's name as users know it."""
    return str(name).replace("_VariableFunctionsClass.", "torch.")


def call_title(kind: int, what: str, waits: bool, caller: str, callee: str) -> str:
    """Returns the title of a call in traces and profiles, in the form that torch's RPC has.

    Args:
        kind: of the request.
        what: the function's name, or "".
        waits: whether its thread waits for the answer at once.
        caller: the name of the worker that makes the call.
        callee: the name of the other worker.

    Example:
        >>> call_title(Kind.CALL, "max", True, "worker0", "worker1")
        'rpc_sync#max(worker0 -> worker1)'
    """
    label = _LABELS.get(kind) or kind_name(kind)
    if kind == Kind.CALL:
        label = "rpc_sync" if waits else "rpc_async"
    return f"{label}{what and '#'}{readable(what)}({caller} -> {callee})"


def asked_for(what: object, kind: int) -> str:
    """Returns what users know a call by: its function's or method's name, or what makes it."""
    return readable(what) or ("to_here" if kind == Kind.FETCH else kind_name(kind))


def kind_name(kind: int) -> str:
    """Returns the name of a kind of message."""
    try:
        return Kind(kind).name
    except ValueError:
        return f"kind {kind}"


def _first_name(pickle: bytes) -> str:
    skipped = ("PROTO", "FRAME", "MEMOIZE", "MARK")
    every = ((operation.name, argument) for operation, argument, _ in pickletools.genops(pickle))
    operations = (each for each in every if each[0] not in skipped)
    operation, module = next(operations)
    if "UNICODE" not in operation:
        return ""
    (_, name), (operation, _) = next(operations), next(operations)
    if operation != "STACK_GLOBAL":
        return str(module)  # a method's name, followed by its arguments
    return "" if f"{module}.{name}".startswith(_NO_FUNCTIONS) else readable(name)
