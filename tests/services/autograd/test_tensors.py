"""Gradients of tensors of any kind: views, dtypes, shapes, layouts and classes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zrpc
from tests.services.autograd.split_models import (
    LEAVES,
    W,
    X,
    assert_as_local,
    call,
    layer,
    leaf,
    train,
)
from tests.support.identity import here
from zrpc.agent.current import find_agent
from zrpc.errors import SerializationError
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128], ids=str)
def test_dtypes(mesh: Mesh, dtype: torch.dtype) -> None:
    x, w = leaf(3, seed=2, dtype=dtype), leaf(3, 3, seed=3, dtype=dtype)

    def model() -> Any:
        far = call("worker1", lambda x: (x @ w) * x, x * 2)
        assert far.dtype == dtype
        return far.abs().sum() if dtype.is_complex else far.sum()

    assert_as_local(mesh, model, [x, w])


Z = leaf(3, seed=4, dtype=torch.complex128)
SCALAR, EMPTY = leaf(seed=5), leaf(0, 3, seed=6)
LARGE = leaf(200, 300, seed=7)
TABLE = leaf(10, 3, seed=8)


def twice_in_one_message() -> Any:
    x = X * 2
    return call("worker1", lambda a, b, c: (a * b * c[0]).sum(), x, x, [x])


def conjugates_and_negatives() -> Any:
    def use(conjugate: Any, negative: Any) -> Any:
        assert conjugate.is_conj() or find_agent() is None
        return (conjugate * 1j).real.sum() + (negative**2).sum()

    return call("worker1", use, Z.conj(), Z.conj().imag)


def scalars_and_tensors_without_elements() -> Any:
    a, b = call("worker1", lambda s, e: (s * s, e * s), SCALAR, EMPTY)
    return a + b.sum()


def frames_of_their_own() -> Any:
    return (call("worker1", lambda x: x.sin() * 2, LARGE * 2) ** 2).sum()


def rows_of(weight: torch.Tensor, *indices: int) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor(indices), weight, sparse=True)


def sparse_gradients() -> Any:
    rows = call("worker1", lambda: rows_of(TABLE, 1, 3, 1))
    return (rows * X).sum() + call("worker1", lambda: rows_of(TABLE, 7)).sum()


def a_sparse_gradient_that_travels() -> Any:
    """The worker that looks the rows up is not the one that has the weight."""
    return (call("worker1", rows_of, W[0], 1, 2, 1) * X).sum()


def a_sparse_activation() -> Any:
    sparse = (W[0] * torch.eye(3, dtype=torch.float64)).to_sparse()
    return (call("worker1", torch.sparse.mm, sparse, W[1]) ** 2).sum()


MODELS = [
    twice_in_one_message,
    conjugates_and_negatives,
    scalars_and_tensors_without_elements,
    frames_of_their_own,
    sparse_gradients,
    a_sparse_gradient_that_travels,
    a_sparse_activation,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_model_has_the_gradients_of_one_process(mesh: Mesh, model: Callable[[], Any]) -> None:
    assert_as_local(mesh, model, [*LEAVES, Z, SCALAR, EMPTY, LARGE, TABLE])


SQUARE = leaf(3, 3, seed=4)


class Reversed(torch.autograd.Function):
    """Returns a view whose gradient is not that of a view."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -gradient


class Blocked(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return None


def unnamed(x: Any) -> Any:
    """Two views that overlap; what they are views of is not in the message."""
    y = x.sin()
    return y[:2], y[1:]


def complex_and_real(x: Any) -> Any:
    y = torch.complex(x.sin(), x.cos())
    return y, torch.view_as_real(y)[..., 1]


def conjugate(x: Any) -> Any:
    y = torch.complex(x.sin(), x.cos())
    return y, y.conj().imag


def plain_base(x: Any) -> Any:
    y = x.detach().clone()
    return y, y[1]


MAKERS: dict[str, Callable[[Any], Any]] = {
    "base and view": lambda x: (y := x.sin(), y[1:]),
    "view and base": lambda x: ((y := x.sin())[1:], y),
    "view of a view": lambda x: (y := x.sin(), y[1:].t()[::2]),
    "expanded": lambda x: (y := x.sin(), y[:1].expand(3, 3)),
    "unnamed": unnamed,
    "offset": lambda x: ((y := x.sin()[1:])[:, 1:], y),
    "real part": complex_and_real,
    "conjugate": conjugate,
    "no grad": plain_base,
}


def change_first(a: Any, b: Any) -> Any:
    a.mul_(W[1][0, 0])
    return (b * b).sum().abs() + a.sum().abs()


def change_second(a: Any, b: Any) -> Any:
    b.mul_(W[1][0, 0])
    return (a * a).sum().abs() + b.sum().abs()


def change_both(a: Any, b: Any) -> Any:
    b.mul_(W[1][0, 1])
    a.sin_()
    return (a * a).sum().abs() + (b * b).sum().abs()


def change_without_grad(a: Any, b: Any) -> Any:
    with torch.no_grad():
        a.add_(1)
    return ((a * a).sum().abs() + (b * b).sum().abs()) * W[1][0, 0]


def change_nothing(a: Any, b: Any) -> Any:
    return ((a * a).sum().abs() + (b.sin() * b).sum().abs()) * W[1][0, 0]


def pair(a: Any, b: Any) -> Any:
    return a, b


CHANGES = [change_first, change_second, change_both, change_without_grad, change_nothing]


def outcome(run: Callable[[Any], Any], model: Callable[[], Any]) -> Any:
    """Returns the gradients, or None if torch refuses the change."""
    try:
        found = run(model)
    except RuntimeError as error:
        if re.search("in-?place|written-to tensor", str(error)) is None:
            raise
        return None
    return [found.get(SQUARE), found.get(W[1])]


def local(model: Callable[[], Any]) -> Any:
    values = torch.autograd.grad(model(), [SQUARE, W[1]], allow_unused=True)
    return {key: g for key, g in zip([SQUARE, W[1]], values, strict=True) if g is not None}


@pytest.mark.parametrize("maker", MAKERS)
def test_changes_have_the_gradients_of_local_ones(mesh: Mesh, maker: str) -> None:
    """Of the arguments of a call, and of its results; also of those that have travelled before."""
    make = MAKERS[maker]
    for change in CHANGES:
        expected = outcome(local, lambda change=change: change(*make(SQUARE)))
        models = (
            lambda change=change: zrpc.rpc_sync("worker1", here(change), make(SQUARE)),
            lambda change=change: change(*zrpc.rpc_sync("worker1", here(make), (SQUARE,))),
            lambda change=change: change(*zrpc.rpc_sync("worker1", here(pair), make(SQUARE))),
        )
        for model in models:
            found = outcome(partial(train, mesh), model)
            torch.testing.assert_close(found, expected, msg=change.__name__)


def test_a_hook_on_a_view_sees_its_gradient(mesh: Mesh) -> None:
    seen: list[torch.Tensor] = []

    def make() -> Any:
        y = SQUARE.sin()
        view = y[1:]
        view.register_hook(seen.append)
        return view, y

    train(mesh, lambda: zrpc.rpc_sync("worker1", here(change_nothing), make()))
    local(lambda: change_nothing(*make()))
    found, expected = seen
    torch.testing.assert_close(found, expected)


def test_a_view_of_a_custom_function_has_the_gradient_of_that_function(mesh: Mesh) -> None:
    """And is not changed in silence."""

    def make(x: Any) -> Any:
        y = x.sin()
        return y, Reversed.apply(y)

    def model(change: Any) -> Any:
        return zrpc.rpc_sync("worker1", here(change), make(SQUARE))

    for change in (change_first, change_second):
        with pytest.raises(RuntimeError, match="custom Function"):
            train(mesh, partial(model, change))
    found = train(mesh, partial(model, change_nothing))
    expected = local(lambda: change_nothing(*make(SQUARE)))
    torch.testing.assert_close(found[SQUARE], expected[SQUARE])


def test_a_view_without_a_gradient_gives_none_to_its_leaf(mesh: Mesh) -> None:
    def block(y: Any, view: Any) -> Any:
        return Blocked.apply(view).sum()

    def model() -> Any:
        y = SQUARE.sin()
        return zrpc.rpc_sync("worker1", here(block), (y, y[1]))

    assert SQUARE not in train(mesh, model)


def test_a_detached_alias_that_is_changed_fails_what_needs_its_value(mesh: Mesh) -> None:
    def change_alias(y: Any, alias: Any) -> Any:
        result = (y * y).sum()
        alias.mul_(2)
        return result

    y = SQUARE.sin()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(mesh, lambda: zrpc.rpc_sync("worker1", here(change_alias), (y, y.detach())))


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


def plain(x: Any) -> Any:
    return x.values() if x.is_nested else x.as_subclass(torch.Tensor)


@pytest.mark.parametrize("make", [named, jagged, give, lambda x: jagged(x.view(3, 1))])
def test_gradients_of_subclasses_are_sent(mesh: Mesh, make: Callable[[Any], Any]) -> None:
    expected = torch.autograd.grad(plain(tanh(make(X.sin()))).sum(), [X, W[1]])
    found = train(mesh, lambda: plain(zrpc.rpc_sync("worker1", here(tanh), (make(X.sin()),))).sum())
    torch.testing.assert_close([found[X], found[W[1]]], list(expected))


@pytest.mark.parametrize(
    "make",
    [
        lambda: named(X.detach().clone()).requires_grad_(),
        lambda: Weight(X.detach()),
        lambda: jagged(X.detach().clone().view(3, 1)).requires_grad_(),
    ],
)
def test_leaves_of_subclasses_get_their_gradients(mesh: Mesh, make: Callable[[], Any]) -> None:
    x = make()
    found = train(mesh, lambda: plain(zrpc.rpc_sync("worker1", here(tanh), (x,))).sum())
    [expected] = torch.autograd.grad(plain(tanh(x)).sum(), [x])
    torch.testing.assert_close(plain(found[x]), plain(expected))


def test_a_lazy_module_is_sent_in_a_context(mesh: Mesh) -> None:
    def run(module: Any, x: Any) -> Any:
        return module(x)

    sent = torch.nn.LazyLinear(2), X.sin().float()  # its dtype is not pickled by torch
    found = train(mesh, lambda: zrpc.rpc_sync("worker1", here(run), sent).sum())
    assert found[X].shape == (3,)


@pytest.mark.parametrize("wrapper", [Wrapper, Keeping])
def test_a_subclass_whose_gradient_would_be_lost_is_refused(mesh: Mesh, wrapper: Any) -> None:
    x = wrapper(torch.ones(3), requires_grad=True)
    with pytest.raises(SerializationError, match=f"found a {wrapper.__name__} that requires grad"):
        train(mesh, lambda: zrpc.rpc_sync("worker1", here(tanh), (x,)).sum())


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

    found = train(mesh, lambda: X.sum() + caught().detach())
    torch.testing.assert_close(found[X], torch.ones_like(X))
    with pytest.raises(RuntimeError, match="in the args of a remote exception"):
        train(mesh, lambda: X.sum() + caught())
