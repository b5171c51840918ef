"""What can be called, by name and by value, on which worker, with what, and what comes back."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import zrpc as rpc
from tests.support.targets import echo
from tests.support.ways import WAYS, Call, ways
from zrpc.testing import Mesh

t = torch.tensor


# -- which worker, with what ---------------------------------------------------------------------


def whoami() -> rpc.WorkerInfo:
    return rpc.get_worker_info()


@ways
def test_destinations(shared: Mesh, call: Call) -> None:
    for name, rank in (("worker1", 1), ("worker0", 0)):
        for to in (name, rank, rpc.WorkerInfo(name, rank)):
            assert call(to, whoami) == rpc.WorkerInfo(name, rank)
    for to in ("nobody", "", 99, -1, 2, rpc.WorkerInfo("worker1", 0)):
        with pytest.raises(RuntimeError, match="could not find destination"):
            call(to, whoami)
    for to in (1.0, None, b"worker1", ["worker1"]):
        with pytest.raises(ValueError, match=r"."):
            call(to, whoami)
    for func in (None, 5, "add", torch.ones(1)):
        with pytest.raises(TypeError, match=r"function should be callable\."):
            call("worker1", func)


@ways
def test_args_and_kwargs(shared: Mesh, call: Call) -> None:
    assert call(1, echo, args=(1, "two"), kwargs={"three": [3], "four": None}) == (
        (1, "two"),
        {"three": [3], "four": None},
    )
    assert call(1, dict, kwargs={"a": 1}) == {"a": 1}
    for args in (None, (), []):
        assert call(1, list, args=args) == []
    for kwargs in ({"to": 1, "func": 2, "timeout": 3}, {}):  # as the call's own parameters
        assert call(1, dict, kwargs=kwargs) == kwargs
    assert call(1, operator.add, [1, 2]) == 3
    cases: list[tuple[Any, Any, str]] = [
        (5, None, "args of type int"),
        (torch.ones(2), None, "args of type Tensor"),  # the comma of a tuple is forgotten
        ((), [1], "kwargs of type list"),
    ]
    for args, kwargs, found in cases:
        with pytest.raises(TypeError, match=rf"expected args to be a tuple.*{found}"):
            call("worker1", max, args=args, kwargs=kwargs)


VALUES: list[Any] = [
    *(None, True, 2**200, -0.0, 1j, "é\0\ud800", range(5), slice(1, None, 2), Ellipsis, int),
    *(b"\0" * 100_000, bytearray(b"x" * 100_000), "y" * 1_000_000),
    *({1: {2: {3: (4, frozenset({5}))}}}, [[]] * 3),
    *(torch.Size([1, 2]), torch.float16, torch.device("cpu")),
    *("__main__", b"a pickle that mentions __main__"),
]
_kept = [1]


def kept() -> list[int]:
    return _kept


def append(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


@ways
def test_values_arrive_as_they_went_and_are_copies(shared: Mesh, call: Call) -> None:
    for to in (0, 1):
        for value in VALUES:
            back = call(to, echo, (value,))
            assert back == value
            assert type(back) is type(value)
        values: list[Any] = [1]
        one, two = call(to, echo, (values, values))
        assert one is two
        assert call(to, append, (values, 2)) == [1, 2]
        assert values == [1]
        rpc.rpc_sync(to, kept).append(2)
        assert _kept == [1]


# -- by name -------------------------------------------------------------------------------------

OPERATORS: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = [
    (torch.add, (t([1.0]), t([2.0])), {"alpha": 10}, t([21.0])),
    (torch.zeros, (2, 3), {"dtype": torch.int8}, torch.zeros(2, 3, dtype=torch.int8)),
    (torch.Tensor.add_, (t([1.0]), 2), {}, t([3.0])),
    (t([1.0]).mul, (5,), {}, t([5.0])),
    (F.conv1d, (torch.ones(1, 1, 3), torch.ones(1, 1, 3)), {}, torch.full((1, 1, 1), 3.0)),
    (torch.linalg.norm, (t([3.0, 4.0]),), {}, t(5.0)),
    (torch.func.vmap(torch.sin), (torch.zeros(3),), {}, torch.zeros(3)),
    (torch._C._nn.gelu, (torch.zeros(2),), {}, torch.zeros(2)),
    (torch.ops.aten.add.Tensor, (t([1.0]), t([2.0])), {}, t([3.0])),
]


@pytest.mark.system
def test_torch_operators(shared: Mesh) -> None:
    for func, args, kwargs, expected in OPERATORS:
        torch.testing.assert_close(rpc.rpc_sync(1, func, args, kwargs), expected)


class Counter:
    """A class with methods of every kind."""

    step = 2

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, n: int = 1) -> int:
        self.count += n
        return self.count

    @classmethod
    def from_step(cls, times: int) -> int:
        return cls.step * times

    @staticmethod
    def double(n: int) -> int:
        return 2 * n

    def __call__(self, n: int) -> int:
        return self.count * n


class Child(Counter):
    step = 3


def decorate(fn: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(fn)
    def wrapper(*args: int) -> int:
        return 10 * fn(*args)

    return wrapper


@decorate
def decorated(n: int) -> int:
    return n + 1


CALLABLES: list[tuple[Any, tuple[Any, ...], Any]] = [
    (max, (1, 5), 5),
    ("a,b".split, (",",), ["a", "b"]),
    (str.upper, ("a",), "A"),
    (dict.fromkeys, ("ab",), {"a": None, "b": None}),
    (functools.partial(operator.sub, 10), (3,), 7),
    (operator.methodcaller("upper"), ("x",), "X"),
    (decorated, (1,), 20),
    (int, ("7",), 7),
    (lambda n: Counter(n).count, (5,), 5),  # uses this module's globals
    (Counter(5).add, (2,), 7),
    (Counter(5), (2,), 10),
    (Counter(1).double, (4,), 8),
    (Child.double, (4,), 8),
    (Child.from_step, (4,), 12),
    (Counter.add, (Counter(1), 5), 6),
    (np.add, (1, 2), 3),
    (np.float64, (1.5,), 1.5),
]


def test_python_callables(shared: Mesh) -> None:
    for func, args, expected in CALLABLES:
        result = rpc.rpc_sync(1, func, args)
        assert result == expected
        assert type(result) is type(expected) or isinstance(result, np.generic)


class Unfound:
    """Pickles as the name of something that isn't there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _resolve, (self.name,)


def _resolve(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def test_a_function_that_the_callee_does_not_have(shared: Mesh) -> None:
    for name in ("no_such_module_zrpc:f", "tests.support.targets:no_such_function"):
        for call in WAYS:
            with pytest.raises(RuntimeError, match="RPC pickler does not serialize") as info:
                call(1, Unfound(name))
            assert any(part in str(info.value) for part in name.split(":"))
            assert call(1, echo, (1,)) == 1  # the worker goes on


# -- by value --------------------------------------------------------------------------------


@ways
def test_lambdas_and_closures(shared: Mesh, call: Call) -> None:
    factor, weights, count = 3, torch.ones(5000), 0

    def scale(x: float) -> torch.Tensor:
        return weights * factor * x

    def increment() -> int:
        nonlocal count
        count += 1
        return count

    for to in (0, 1):
        torch.testing.assert_close(call(to, scale, (2.0,)), torch.full((5000,), 6.0))
        assert [call(to, increment) for _ in range(3)] == [1, 1, 1]  # its variables are copies
        assert call(to, lambda f, x: f(f(x)), (lambda x: 2 * x, 3)) == 12
        assert call(to, lambda n: lambda x: x + n, (5,))(1) == 6
        assert call(to, lambda a, b=2, *, c=3: (a, b, c), (1,), {"c": 4}) == (1, 2, 4)
    assert count == 0


def test_local_class_its_instances_and_its_methods(shared: Mesh) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self, by: int) -> Point:
            return Point(self.x + by)

    assert rpc.rpc_sync(1, Point(1).moved, (2,)).x == 3
    assert rpc.rpc_sync(1, lambda p: p.x, (Point(8),)) == 8
    assert isinstance(rpc.rpc_sync(1, Point, (7,)), Point)


# -- TorchScript -----------------------------------------------------------------------------


@torch.jit.script
def script_add(x: torch.Tensor, y: int = 2) -> torch.Tensor:
    return x + y


class ScriptMe(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torch_script(shared: Mesh) -> None:
    assert rpc.rpc_sync(1, script_add, (), {"y": 5, "x": t([1.0])}) == t([6.0])
    assert rpc.rpc_sync(1, lambda: script_add)(t([1.0])) == t([3.0])
    module = torch.jit.script(ScriptMe())
    assert rpc.rpc_sync(1, module, (t([2.0]),)) == t([6.0])
    assert rpc.rpc_sync(1, module.twice, (t([2.0]),)) == t([12.0])
    back = rpc.rpc_sync(1, echo, (module,))
    assert isinstance(back, torch.jit.ScriptModule)
    assert back(t([2.0])) == t([6.0])
