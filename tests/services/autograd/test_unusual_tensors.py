"""Tensors of other classes and layouts: their gradients are sent, or an error says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
from tests.services.autograd.split_models import W, X, layer, train
from tests.support.identity import here
from zrpc.errors import SerializationError
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=2, timeout=60)


class Named(torch.Tensor):
    """A subclass with an attribute, whose operators are torch's."""

    name = ""


class Weight(torch.nn.Parameter):
    """A subclass of Parameter."""


class Wrapper(torch.Tensor):
    """A subclass that dispatches operators itself; its elements are in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=requires_grad
        )

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [arg.inner if isinstance(arg, cls) else arg for arg in args]
        result = func(*args, **kwargs or {})
        return cls(result) if isinstance(result, torch.Tensor) else result


class Keeping(Wrapper):
    """A subclass that says itself how it is pickled, without its gradient."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Keeping, (self.inner, self.requires_grad)


class Giving(torch.Tensor):
    """A subclass that says itself how it is pickled, by tensors that are part of the graph."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return give, (self.as_subclass(torch.Tensor),)


def give(x: torch.Tensor) -> Any:
    return x.as_subclass(Giving)


def named(x: torch.Tensor) -> Any:
    result = x.as_subclass(Named)
    result.name = "x"
    return result


def jagged(values: torch.Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))


def strided(x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype: torch's own words
        return torch.nested.as_nested_tensor([x[:1], x[1:]])


def tanh(x: Any) -> Any:
    return torch.tanh(x) * W[1][0, 0]


def tanh_and_type(x: Any) -> Any:
    return tanh(x), type(x).__name__


def plain(x: Any) -> Any:
    return x.values() if x.is_nested else x.as_subclass(torch.Tensor)


@pytest.mark.parametrize("make", [named, jagged, give, lambda x: jagged(x.view(3, 1))])
def test_gradients_of_subclasses_are_sent(mesh: Mesh, make: Callable[[Any], Any]) -> None:
    expected = torch.autograd.grad(plain(tanh(make(X.sin()))).sum(), [X, W[1]])
    found = train(mesh, lambda: plain(zrpc.rpc_sync("worker1", here(tanh), (make(X.sin()),))).sum())
    torch.testing.assert_close([found[X], found[W[1]]], list(expected))


def test_a_subclass_arrives_with_its_type_and_attributes(mesh: Mesh) -> None:
    def describe(x: Any) -> Any:
        assert (type(x), x.name) == (Named, "x")
        return x * 1

    train(mesh, lambda: plain(zrpc.rpc_sync("worker1", here(describe), (named(X.sin()),))).sum())


@pytest.mark.parametrize(
    "make", [lambda: named(X.detach().clone()).requires_grad_(), lambda: Weight(X.detach())]
)
def test_leaves_of_subclasses_get_their_gradients(mesh: Mesh, make: Callable[[], Any]) -> None:
    x = make()
    found = train(mesh, lambda: plain(zrpc.rpc_sync("worker1", here(tanh), (x,))).sum())
    [expected] = torch.autograd.grad(plain(tanh(x)).sum(), [x])
    torch.testing.assert_close(plain(found[x]), plain(expected))


def test_a_jagged_leaf_gets_its_gradient(mesh: Mesh) -> None:
    x = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged, requires_grad=True
    )
    found = train(mesh, lambda: zrpc.rpc_sync("worker1", here(tanh), (x,)).values().sum())
    [expected] = torch.autograd.grad(tanh(x).values().sum(), [x])
    torch.testing.assert_close(found[x].values(), expected.values(), check_dtype=False)


@pytest.mark.parametrize("wrapper", [Wrapper, Keeping])
def test_a_subclass_whose_gradient_would_be_lost_is_refused(mesh: Mesh, wrapper: Any) -> None:
    x = wrapper(torch.ones(3), requires_grad=True)
    with pytest.raises(SerializationError, match=f"found a {wrapper.__name__} that requires grad"):
        train(mesh, lambda: zrpc.rpc_sync("worker1", here(tanh), (x,)).sum())


def test_a_subclass_by_value_is_refused_too(mesh: Mesh) -> None:
    x = Wrapper(torch.ones(3), requires_grad=True)
    with pytest.raises(SerializationError, match="found a Wrapper that requires grad"):
        train(mesh, lambda: zrpc.rpc_sync("worker1", lambda: x))


def test_a_lazy_module_is_sent_in_a_context(mesh: Mesh) -> None:
    def run(module: Any, x: Any) -> Any:
        return module(x)

    module = torch.nn.LazyLinear(2)
    found = train(
        mesh, lambda: zrpc.rpc_sync("worker1", here(run), (module, X.sin().float())).sum()
    )
    assert found[X].shape == (3,)


def test_a_strided_nested_tensor_is_refused_in_a_graph_only(mesh: Mesh) -> None:
    with pytest.raises(SerializationError, match=r"found a nested tensor .* send tensor.unbind"):
        train(mesh, lambda: zrpc.rpc_sync("worker1", here(tanh), (strided(X.sin()),)).sum())
    copy = mesh.run(0, zrpc.rpc_sync, "worker1", torch.sin, (strided(X.detach()),))
    for found, part in zip(copy.unbind(), strided(X.detach()).unbind(), strict=True):
        torch.testing.assert_close(found, part.sin())


class Diverged(ValueError):
    """An error with a tensor."""


@pytest.mark.parametrize("local", [False, True])
def test_a_tensor_of_an_exception_can_be_read_but_has_no_gradient(mesh: Mesh, local: bool) -> None:
    class OfThisTest(Diverged):
        pass

    error_type = OfThisTest if local else Diverged

    def diverge(x: Any) -> Any:
        raise error_type("loss", {"loss": layer(1, x).sum()})

    def caught() -> Any:
        with pytest.raises(Diverged) as info:
            zrpc.rpc_sync("worker1", here(diverge), (X.sin(),))
        found = info.value.args[1]["loss"]
        torch.testing.assert_close(found.detach(), layer(1, X.sin()).sum().detach())
        return found

    def harmless() -> Any:
        return X.sum() + caught().detach()

    torch.testing.assert_close(train(mesh, harmless)[X], torch.ones_like(X))
    with pytest.raises(RuntimeError, match="in the args of a remote exception"):
        train(mesh, lambda: X.sum() + caught())
