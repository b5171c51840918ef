"""The names of functions: for people and for counts, and in requests without unpickling them."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zrpc.calls.function_names import function_of, handler_name, name_of
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


def test_a_function_or_a_method_of_a_value() -> None:
    for function, name in (
        (functools.reduce, "reduce"),
        (operator.add, "add"),
        (torch.nn.Linear.forward, "Linear.forward"),
        (lambda: 0, ""),
        (Dangerous().method, ""),
        (functools.partial(max, 1), ""),
    ):
        assert function_of(packed(Kind.CALL, (function, (Dangerous(),), {}))) == name
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


def test_a_handler_is_named_without_running_code_of_the_program() -> None:
    request = packed(Kind.CALL, (max, (), {}))
    for function, name in (
        (Reads(), "max"),  # the name in the message
        (functools.wraps(packed)(Reads()), "packed"),
        (Reads, "Reads"),
        (Reads().__call__, "Reads.__call__"),
        ([].append, "list.append"),
        (torch.add, "torch.add"),
        (None, "max"),
    ):
        request.scope = SimpleNamespace(function=function)
        assert handler_name(request) == name


def test_what_asks_for_no_function_has_no_name() -> None:
    assert [name_of(body) for body in [((1, 2), ()), ((), ()), (), None]] == [""] * 4
    assert name_of(("append", (1,), {})) == "append"


def test_a_script_function_has_its_own_name() -> None:
    @torch.jit.script
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    request = Message(Kind.CALL)
    request.scope = SimpleNamespace(function=double)
    assert name_of((double, (), {})) == "double" == handler_name(request)


def test_the_object_of_a_c_method_is_not_kept() -> None:
    class Items(dict[str, int]):
        """Has methods in C."""

    items = Items()
    gone = weakref.ref(items)
    assert name_of((items.update, (), {})).endswith("Items.update")
    assert name_of((Items.fromkeys, (), {})).endswith("Items.fromkeys")
    kept = weakref.ref(Items)
    del items, Items
    gc.collect()
    assert gone() is None
    assert kept() is None
