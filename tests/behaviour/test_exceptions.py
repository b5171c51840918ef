"""What a caller sees when a call fails or a value can't travel, and that the callee goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.settled import result_within
from tests.support.targets import echo, fail, fail_with
from tests.support.waiting import SOON
from tests.support.ways import WAYS, Call, ways
from zrpc.testing import Mesh

pytestmark = pytest.mark.usefixtures("goes_on")


class Misfit(Exception):
    """Its args don't fit its constructor: pickle can't make it again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two} make a misfit")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("has a lock")
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses to have attributes set, its cause and its traceback too."""

    code: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (self.code,)


# -- the callee's own ------------------------------------------------------------------------

ERRORS = [
    *(ValueError("bad"), KeyError(("a", 1)), StopIteration(5), AssertionError("a", 2)),
    *(FileNotFoundError(2, "No such file", "name"), TimeoutError("of the callee")),
    *(Exception("plain", {"with": [1, 2]}), Exception("text that mentions __main__")),
    *(rpc.RpcTimeoutError("the callee's own"), rpc.WorkerDied("somebody else"), Frozen(7)),
]


@ways
def test_type_and_args_are_the_callees(shared: Mesh, call: Call) -> None:
    not_a_line: Any = 5  # Python's traceback module fails to show it
    for to in (0, 1):
        for error in ERRORS:
            with pytest.raises(type(error)) as info:
                call(to, fail, (error,))
            assert type(info.value) is type(error)
            assert info.value.args == error.args
            if isinstance(error, OSError):
                assert (info.value.errno, info.value.filename) == (error.errno, error.filename)
        for kind, args, text in (
            (Misfit, (7, 3), "7 and 3 make"),
            (SyntaxError, ("bad", ("file", 1, 1, not_a_line)), "bad"),
        ):
            with pytest.raises(kind, match=f"^{text}"):
                call(to, fail_with, (kind, *args), timeout=5)


def fail_from() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise Frozen(7) from error


@ways
def test_the_remote_traceback_is_the_cause(shared: Mesh, call: Call) -> None:
    with pytest.raises(Frozen) as info:
        call(1, fail_from)
    cause = info.value.__cause__
    assert isinstance(cause, rpc.RemoteError)
    for part in (
        "On WorkerInfo(id=1, name=worker1)",
        "Traceback (most recent call last)",
        "raise Frozen(7) from error",
        "KeyError: 'inner'",
        "test_exceptions.py",
    ):
        assert part in str(cause)
    # And so Python shows it where nobody catches it.
    assert "On WorkerInfo(id=1, name=worker1)" in "".join(traceback.format_exception(info.value))


def test_an_error_through_two_workers(shared: Mesh) -> None:
    with pytest.raises(KeyError, match="deep") as info:
        rpc.rpc_sync(1, rpc.rpc_sync, (0, fail, (KeyError("deep"),)))
    for name in ("worker0", "worker1"):
        assert f"name={name}" in str(info.value.__cause__)


ENDS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)


@ways
def test_what_can_not_travel_arrives_as_text(shared: Mesh, call: Call) -> None:
    for kind in (Unpicklable, *ENDS * 5):  # for more than the worker has threads
        with pytest.raises(rpc.RemoteError, match="Original exception on remote side was") as info:
            call(1, fail_with, (kind,), timeout=10)
        text = "has a lock" if kind is Unpicklable else kind.__name__
        for part in (text, "On WorkerInfo(id=1, name=worker1)", "fail_with"):
            assert part in str(info.value)


# -- values that can not be pickled, or can not be unpickled -------------------------------------


class RaisesWhenPickled:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class RaisesWhenUnpickled:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return fail, (self.error,)


def iter_of(count: int) -> Any:
    return (number for number in range(count))


UNPICKLABLE: list[Callable[[], Any]] = [
    *(threading.Lock, sys._getframe, torch.futures.Future, rpc.Future, socket.socket),
    lambda: {"deep": [threading.Lock()]},
    lambda: iter_of(3),
    *(partial(RaisesWhenPickled, kind("raised")) for kind in (TypeError, ValueError, RuntimeError)),
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_unpicklable_value_raises_at_the_call_itself_or_is_its_result(shared: Mesh) -> None:
    for make in UNPICKLABLE:
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(rpc.SerializationError):
                call(1, echo, (make(),))
        for way in WAYS:
            with pytest.raises(rpc.SerializationError):
                way(1, make, timeout=10)


def test_the_error_names_the_innermost_type_that_can_not_be_pickled(shared: Mesh) -> None:
    batch = [1, {"module": Unpicklable()}]
    with pytest.raises(rpc.SerializationError, match=r"of type Unpicklable that can't be"):
        rpc.rpc_sync("worker1", echo, args=("a", batch))
    with pytest.raises(rpc.SerializationError, match=r"found one of type generator that can't be"):
        rpc.rpc_sync("worker1", iter_of, args=(3,))


def test_the_error_names_the_function_or_class_that_can_not_go_by_value(shared: Mesh) -> None:
    @functools.singledispatch
    def by_type(value: Any) -> Any: ...

    class HasMethod:
        @functools.singledispatchmethod
        def by_type(self, value: Any) -> Any: ...

    for found in (by_type, HasMethod):
        name = re.escape(f"{__name__}.{found.__qualname__}")
        advice = rf"found {name}, which goes by value .*; move it to a module"
        with pytest.raises(rpc.SerializationError, match=advice):
            rpc.rpc_sync("worker1", found)
        with pytest.raises(rpc.SerializationError, match=advice):
            rpc.rpc_sync("worker1", echo, args=([1, {"what": found}],))


def test_arguments_nested_too_deep_for_pickle(shared: Mesh) -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    try:
        with pytest.raises(rpc.SerializationError):
            rpc.rpc_sync(1, len, (value,))
    finally:
        while value:  # else the interpreter frees it recursively
            value = value[0]


class _Plain:
    """Carries an exception in a message without being one."""

    def __init__(self, error: BaseException) -> None:
        self.what = (type(error), *error.args)

    def __reduce__(self) -> Any:
        return _make_exception, self.what


def _make_exception(kind: type[BaseException], *args: Any) -> BaseException:
    return kind(*args)


def test_a_result_whose_pickling_would_end_the_worker(shared: Mesh) -> None:
    for call, error in itertools.product(WAYS, (SystemExit(3), KeyboardInterrupt())):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            call(1, RaisesWhenPickled, (_Plain(error),), timeout=5)


def test_an_argument_that_can_not_be_unpickled_at_the_callee(shared: Mesh, gate: Gate) -> None:
    other = rpc.rpc_async(1, gate.wait_inside, ("other",))
    gate.await_entry()
    for call, error in itertools.product(WAYS, (ValueError("no"), SystemExit(3))):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            call(1, echo, (RaisesWhenUnpickled(error),), timeout=10)
    gate.open()
    assert other.wait() == "other"


def value_when_done(*args: Any, **kwargs: Any) -> Any:
    return result_within(rpc.rpc_async(*args, **kwargs), SOON)  # no thread waits


def test_a_result_that_would_end_the_caller(shared: Mesh) -> None:
    for call in (*WAYS, value_when_done):
        with pytest.raises(rpc.SerializationError, match="SystemExit"):
            call(1, RaisesWhenUnpickled, (_Plain(SystemExit(3)),), timeout=5)
