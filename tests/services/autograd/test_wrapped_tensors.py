"""Tensors inside of other objects that travel are part of the graph."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import zrpc
from tests.services.autograd.both_sides import Carrier, assert_expected, both, run_module
from tests.services.autograd.split_models import (
    X,
    call,
    layer,
    leaf,
    train,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

# Ways to wrap.


class Reduced:
    """One that says itself how it is pickled."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return Reduced, (self.x,)


class Slotted:
    __slots__ = ("x",)


@dataclass
class Record:
    x: torch.Tensor
    more: dict = field(default_factory=dict)


Pair = namedtuple("Pair", ["first", "second"])


def slotted(x: Any) -> Any:
    value = Slotted()
    value.x = x
    return value


def cyclic(x: Any) -> Any:
    value = [x]
    value.append(value)
    return value


def module_with(x: Any) -> Any:
    module = torch.nn.Module()
    module.x = x
    return module


WRAPPERS = {
    "list": (lambda x: [1, x], lambda v: v[1]),
    "tuple": (lambda x: (x, None), lambda v: v[0]),
    "dict": (lambda x: {"x": x}, lambda v: v["x"]),
    "nested": (lambda x: {"a": [({"b": x},)]}, lambda v: v["a"][0][0]["b"]),
    "ordered": (lambda x: OrderedDict(x=x), lambda v: v["x"]),
    "namedtuple": (lambda x: Pair(0, x), lambda v: v.second),
    "object": (Carrier, lambda v: v.x),
    "reduced": (Reduced, lambda v: v.x),
    "slots": (slotted, lambda v: v.x),
    "dataclass": (lambda x: Record(x, {"x": x}), lambda v: (v.x + v.more["x"]) / 2),
    "cycle": (cyclic, lambda v: v[1][1][0]),
    "module": (module_with, lambda v: v.x),
    "closure": (lambda x: lambda: x, lambda v: v()),
    "beside others": (lambda x: [torch.ones(3), x, torch.ones(1), "x"], lambda v: v[1]),
    "unlike": (lambda x: [x.detach(), x], lambda v: v[1]),
}


def unwrap(wrapper: Any, value: Any) -> Any:
    return both(WRAPPERS[wrapper][1](value))


def wrapped(wrapper: Any, x: Any) -> Any:
    return WRAPPERS[wrapper][0](both(x))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_arguments(mesh: Mesh, wrapper: Any) -> None:
    wrap, _ = WRAPPERS[wrapper]
    assert_expected(
        mesh,
        lambda: (zrpc.rpc_sync("worker1", unwrap, (wrapper, wrap(X.sin()))) * 2).sum(),
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_results(mesh: Mesh, wrapper: Any) -> None:
    _, unwrap = WRAPPERS[wrapper]
    assert_expected(
        mesh,
        lambda: (unwrap(zrpc.rpc_sync("worker1", wrapped, (wrapper, X.sin()))) * 2).sum(),
    )


@pytest.mark.parametrize("wrapper", ["object", "nested", "closure"])
def test_wrapped_values_of_rrefs(mesh: Mesh, wrapper: str) -> None:
    _, unwrap = WRAPPERS[wrapper]
    assert_expected(
        mesh,
        lambda: (unwrap(zrpc.remote("worker1", wrapped, (wrapper, X.sin())).to_here()) * 2).sum(),
    )


def test_parameters_that_travel(mesh: Mesh) -> None:
    parameter = torch.nn.Parameter(leaf(3, seed=3).detach())

    def there(p: Any) -> Any:
        return layer(1, p)

    found = train(mesh, lambda: call("worker1", there, parameter).sum())
    [expected] = torch.autograd.grad(layer(1, parameter).sum(), [parameter])
    torch.testing.assert_close(found[parameter], expected)


def test_a_module_that_travels(mesh: Mesh) -> None:
    """Its parameters are those of the worker that sent it."""
    linear = torch.nn.Linear(3, 3).double()
    found = train(mesh, lambda: zrpc.rpc_sync("worker1", run_module, (linear, X.sin())).sum())
    expected = torch.autograd.grad(both(linear(X.sin())).sum(), [*linear.parameters(), X])
    torch.testing.assert_close([found[at] for at in (*linear.parameters(), X)], list(expected))
