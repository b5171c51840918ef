"""The names of functions in requests, read without unpickling."""

from __future__ import annotations

import functools
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zrpc.calls.function_names import function_of, handler_name
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder


class Dangerous:
    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)

    def method(self) -> None: ...


def packed(kind: Kind, body: Any) -> Message:
    message = Message(kind)
    Encoder(None, 1, True).pack(body, message)
    return message


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (functools.reduce, "reduce"),
        (operator.add, "add"),
        (torch.nn.Linear.forward, "Linear.forward"),
        (lambda: 0, ""),
        (Dangerous().method, ""),
        (functools.partial(max, 1), ""),
    ],
)
def test_a_function(function: Any, name: str) -> None:
    assert function_of(packed(Kind.CALL, (function, (Dangerous(),), {}))) == name


def test_a_method_of_a_value() -> None:
    assert function_of(packed(Kind.METHOD, ("append", (1,), {}))) == "append"
    assert function_of(packed(Kind.REMOTE, ("append", (Dangerous(),), {}))) == "append"


def test_other_kinds_and_other_bytes() -> None:
    assert function_of(packed(Kind.FETCH, None)) == ""
    for body in (b"", b"\x80", b"\xff" * 600, b"\x80\x05\x8c\xff", b"\x80\x05\x8d" + b"\xff" * 8):
        assert function_of(Message(Kind.CALL, body=memoryview(body))) == ""


class Reads:
    """Would have the I/O thread run code of the program to find the name."""

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__":
            pytest.fail("code of the program has run")
        raise AttributeError(name)

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Reads(), "max"),  # the name in the message
        (functools.wraps(test_a_function)(Reads()), "test_a_function"),
        (Reads, "Reads"),
        (Reads().__call__, "Reads.__call__"),
        ([].append, "list.append"),
        (torch.add, "torch.add"),
        (None, "max"),
    ],
)
def test_a_handler_is_named_without_running_code_of_the_program(function: Any, name: str) -> None:
    request = packed(Kind.CALL, (max, (), {}))
    request.scope = SimpleNamespace(function=function)
    assert handler_name(request) == name
