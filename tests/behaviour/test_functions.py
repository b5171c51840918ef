"""What can be called: functions of all kinds, by name and by value."""

from __future__ import annotations

import functools
import importlib
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import zrpc as rpc
from tests.support.targets import echo
from tests.support.ways import WAYS, ways
from zrpc.testing import Mesh

t = torch.tensor


# -- torch's own -----------------------------------------------------------------------------


OPERATORS: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = [
    (torch.add, (t([1.0]), t([2.0])), {"alpha": 10}, t([21.0])),
    (torch.zeros, (2, 3), {"dtype": torch.int8}, torch.zeros(2, 3, dtype=torch.int8)),
    (torch.Tensor.add_, (t([1.0]), 2), {}, t([3.0])),
    (torch.Tensor.sum, (torch.ones(2, 2),), {"dim": 0}, t([2.0, 2.0])),
    (t([1.0]).mul, (5,), {}, t([5.0])),
    (F.relu, (t([-1.0, 1.0]),), {}, t([0.0, 1.0])),
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


# -- Python's --------------------------------------------------------------------------------


class Counter:
    """A class with methods of every kind."""

    step = 2

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.count == self.count

    __hash__ = None  # type: ignore[assignment]

    def add(self, n: int = 1) -> int:
        self.count += n
        return self.count

    @classmethod
    def from_step(cls, times: int) -> Counter:
        return cls(cls.step * times)

    @staticmethod
    def double(n: int) -> int:
        return 2 * n

    def __call__(self, n: int) -> int:
        return self.count * n

    class Inner:
        @staticmethod
        def name() -> str:
            return "inner"


class Child(Counter):
    step = 3


def decorated_with(factor: int) -> Callable[..., Any]:
    def decorate(fn: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(fn)
        def wrapper(*args: int) -> int:
            return factor * fn(*args)

        return wrapper

    return decorate


@decorated_with(10)
def decorated(n: int) -> int:
    return n + 1


CALLABLES: list[tuple[Any, tuple[Any, ...], Any]] = [
    (max, (1, 5), 5),
    (math.sqrt, (4,), 2.0),
    (operator.add, ("a", "b"), "ab"),
    ("a,b".split, (",",), ["a", "b"]),
    (str.upper, ("a",), "A"),
    ([1, 2].count, (2,), 1),
    (dict.fromkeys, ("ab",), {"a": None, "b": None}),
    (functools.partial(operator.sub, 10), (3,), 7),
    (operator.itemgetter(1), ([1, 2],), 2),
    (operator.methodcaller("upper"), ("x",), "X"),
    (echo, (1,), 1),
    (decorated, (1,), 20),
    (int, ("7",), 7),
    (Counter, (5,), Counter(5)),
    (Counter(5).add, (2,), 7),
    (Counter(5), (2,), 10),
    (Counter.double, (4,), 8),
    (Counter(1).double, (4,), 8),
    (Counter.from_step, (4,), Counter(8)),
    (Child.from_step, (4,), Child(12)),
    (Counter.add, (Counter(1), 5), 6),
    (Counter.Inner.name, (), "inner"),
    (np.add, (1, 2), 3),
    (np.float64, (1.5,), 1.5),
]


def test_python_callables(shared: Mesh) -> None:
    for func, args, expected in CALLABLES:
        result = rpc.rpc_sync(1, func, args)
        assert result == expected
        assert type(result) is type(expected) or isinstance(result, np.generic)


# -- by value --------------------------------------------------------------------------------


@ways
def test_lambda_and_closure(shared: Mesh, call: Callable[..., Any]) -> None:
    factor, weights = 3, torch.ones(5000)

    def scale(x: float) -> torch.Tensor:
        return weights * factor * x

    for to in (0, 1):
        assert call(to, lambda x: x + 1, (1,)) == 2
        torch.testing.assert_close(call(to, scale, (2.0,)), torch.full((5000,), 6.0))


def test_a_closures_variables_are_copies(shared: Mesh) -> None:
    count = 0

    def increment() -> int:
        nonlocal count
        count += 1
        return count

    assert [rpc.rpc_sync(1, increment) for _ in range(3)] == [1, 1, 1]
    assert count == 0


def test_lambda_as_an_argument_and_as_a_result(shared: Mesh) -> None:
    assert rpc.rpc_sync(1, lambda f, x: f(f(x)), (lambda x: 2 * x, 3)) == 12
    assert rpc.rpc_sync(1, lambda n: lambda x: x + n, (5,))(1) == 6

    assert rpc.rpc_sync(1, lambda a, b=2, *, c=3: (a, b, c), (1,), {"c": 4}) == (1, 2, 4)
    assert rpc.rpc_sync(1, lambda: Counter(3).add()) == 4  # uses this module's globals


def test_local_class_its_instances_and_its_methods(shared: Mesh) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self, by: int) -> Point:
            return Point(self.x + by)

    assert rpc.rpc_sync(1, Point(1).moved, (2,)).x == 3
    assert rpc.rpc_sync(1, Point, (7,)).x == 7
    assert rpc.rpc_sync(1, lambda p: p.x, (Point(8),)) == 8
    assert isinstance(rpc.rpc_sync(1, Point, (7,)), Point)


# -- functions that the callee does not have ---------------------------------------------------


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


@pytest.mark.zrpc(processes=True)
def test_a_function_of_a_module_that_only_the_caller_has(mesh: Mesh) -> None:
    def call(text: str) -> Any:
        import types

        module = types.ModuleType("only_here")
        exec(text, module.__dict__)
        sys.modules["only_here"] = module
        return rpc.rpc_sync("worker1", module.f)

    with pytest.raises(RuntimeError, match="RPC pickler does not serialize") as info:
        mesh.run(0, call, "def f():\n    return 1\n")
    assert "only_here" in str(info.value)


# -- TorchScript -----------------------------------------------------------------------------


@torch.jit.script
def script_add(x: torch.Tensor, y: int = 2) -> torch.Tensor:
    return x + y


class ScriptMe(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
class TestTorchScript:
    def test_function(self, shared: Mesh) -> None:
        assert rpc.rpc_sync(1, script_add, (t([1.0]), 3)) == t([4.0])
        assert rpc.rpc_sync(1, script_add, (t([1.0]),)) == t([3.0])
        assert rpc.rpc_sync(1, script_add, (), {"y": 5, "x": t([1.0])}) == t([6.0])
        assert rpc.rpc_sync(1, lambda f: f(t([1.0])), (script_add,)) == t([3.0])
        assert rpc.rpc_sync(1, lambda: script_add)(t([1.0])) == t([3.0])

    def test_module(self, shared: Mesh) -> None:
        module = torch.jit.script(ScriptMe())
        assert rpc.rpc_sync(1, module, (t([2.0]),)) == t([6.0])
        assert rpc.rpc_sync(1, lambda m: m.twice(t([2.0])), (module,)) == t([12.0])
        back = rpc.rpc_sync(1, echo, (module,))
        assert isinstance(back, torch.jit.ScriptModule)
        assert back(t([2.0])) == t([6.0])
        assert rpc.rpc_sync(1, module.forward, (t([2.0]),)) == t([6.0])
        assert rpc.rpc_sync(1, module.twice, (t([2.0]),)) == t([12.0])
