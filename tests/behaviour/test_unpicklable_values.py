"""Arguments and results that can not be pickled, or can not be unpickled."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.targets import echo, fail
from tests.support.waiting import SOON
from tests.support.ways import WAYS, Call, ways
from zrpc.testing import Mesh

pytestmark = pytest.mark.usefixtures("goes_on")


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


class HoldsLock:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def iter_of(count: int) -> Any:
    return (number for number in range(count))


UNPICKLABLE: list[Callable[[], Any]] = [
    threading.Lock,
    lambda: (i for i in range(3)),
    lambda: sys._getframe(),
    lambda: {"deep": [threading.Lock()]},
    lambda: RaisesWhenPickled(TypeError("pickling")),
    lambda: RaisesWhenPickled(ValueError("pickling")),
    lambda: RaisesWhenPickled(RuntimeError("pickling")),
    lambda: torch.futures.Future(),
    lambda: rpc.Future(),
    socket.socket,
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_unpicklable_argument_raises_at_the_call_itself(shared: Mesh) -> None:
    for call, make in itertools.product((rpc.rpc_sync, rpc.rpc_async, rpc.remote), UNPICKLABLE):
        with pytest.raises(rpc.SerializationError):
            call(1, echo, (make(),))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@ways
def test_an_unpicklable_result_is_an_error_at_the_caller(shared: Mesh, call: Call) -> None:
    for make in UNPICKLABLE:
        with pytest.raises(rpc.SerializationError):
            call(1, make, timeout=10)


def test_the_error_names_the_innermost_type_that_can_not_be_pickled(shared: Mesh) -> None:
    batch = [1, {"module": HoldsLock()}]
    with pytest.raises(rpc.SerializationError, match=r"found one of type HoldsLock that can't be"):
        rpc.rpc_sync("worker1", echo, args=("a", batch))
    with pytest.raises(rpc.SerializationError, match=r"found one of type generator that can't be"):
        rpc.rpc_sync("worker1", iter_of, args=(3,))


@pytest.mark.zrpc(timeout=15)
def test_a_result_whose_pickling_would_end_the_worker(caller: Mesh) -> None:
    for call, error in itertools.product(WAYS, (SystemExit(3), KeyboardInterrupt())):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            call(1, RaisesWhenPickled, (_Plain(error),), timeout=5)


class _Plain:
    """Carries an exception in a message without being one."""

    def __init__(self, error: BaseException) -> None:
        self.what = (type(error), *error.args)

    def __reduce__(self) -> Any:
        return _make_exception, self.what


def _make_exception(kind: type[BaseException], *args: Any) -> BaseException:
    return kind(*args)


def test_an_argument_that_can_not_be_unpickled_at_the_callee(shared: Mesh, gate: Gate) -> None:
    other = rpc.rpc_async(1, gate.wait_inside, ("other",))
    gate.await_entry()
    for call, error in itertools.product(WAYS, (ValueError("no"), SystemExit(3))):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            call(1, echo, (RaisesWhenUnpickled(error),), timeout=10)
    gate.open()
    assert other.wait() == "other"


@pytest.mark.zrpc(timeout=15)
def test_a_result_that_would_end_the_caller(caller: Mesh) -> None:
    for call in WAYS:
        with pytest.raises(rpc.SerializationError, match="SystemExit"):
            call(1, RaisesWhenUnpickled, (_Plain(SystemExit(3)),), timeout=5)
    future = rpc.rpc_async(1, RaisesWhenUnpickled, (_Plain(SystemExit(3)),))
    done = threading.Event()
    future.add_done_callback(lambda f: done.set())  # no thread waits
    assert done.wait(SOON)
    with pytest.raises(rpc.SerializationError, match="SystemExit"):
        future.wait()


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
