"""Tensors of one message that are views of each other, and are changed in place on arrival."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zrpc
from tests.services.autograd.split_models import W, leaf, train
from tests.support.identity import here
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=2, timeout=60)

X = leaf(3, 3, seed=4)


class Reversed(torch.autograd.Function):
    """Returns a view whose gradient is not that of a view."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -gradient


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


CHANGES = [change_first, change_second, change_both, change_without_grad, change_nothing]


def outcome(run: Callable[[Any], Any], model: Callable[[], Any]) -> Any:
    """Returns the gradients, or None if torch refuses the change."""
    try:
        found = run(model)
    except RuntimeError as error:
        if re.search("in-?place|written-to tensor", str(error)) is None:
            raise
        return None
    return [found.get(X), found.get(W[1])]


def local(model: Callable[[], Any]) -> Any:
    values = torch.autograd.grad(model(), [X, W[1]], allow_unused=True)
    return {key: g for key, g in zip([X, W[1]], values, strict=True) if g is not None}


def assert_as_local(mesh: Mesh, make: Callable[[Any], Any], change: Callable[..., Any]) -> None:
    """Has arguments and results of a call changed, and compares the gradients."""
    expected = outcome(local, lambda: change(*make(X)))
    models = (
        lambda: zrpc.rpc_sync("worker1", here(change), make(X)),
        lambda: change(*zrpc.rpc_sync("worker1", here(make), (X,))),
    )
    for model in models:
        found = outcome(partial(train, mesh), model)
        torch.testing.assert_close(found, expected, msg=change.__name__)


@pytest.mark.parametrize("maker", MAKERS)
def test_changes_have_the_gradients_of_local_ones(mesh: Mesh, maker: str) -> None:
    for change in CHANGES:
        assert_as_local(mesh, MAKERS[maker], change)


def test_a_hook_on_a_view_sees_its_gradient(mesh: Mesh) -> None:
    seen: list[torch.Tensor] = []

    def make() -> Any:
        y = X.sin()
        view = y[1:]
        view.register_hook(seen.append)
        return view, y

    train(mesh, lambda: zrpc.rpc_sync("worker1", here(change_nothing), make()))
    local(lambda: change_nothing(*make()))
    found, expected = seen
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("change", [change_first, change_second])
def test_a_view_of_a_custom_function_is_not_changed_in_silence(mesh: Mesh, change: Any) -> None:
    def model() -> Any:
        y = X.sin()
        return zrpc.rpc_sync("worker1", here(change), (y, Reversed.apply(y)))

    with pytest.raises(RuntimeError, match="custom Function"):
        train(mesh, model)


def test_a_view_of_a_custom_function_has_the_gradient_of_that_function(mesh: Mesh) -> None:
    def make(x: Any) -> Any:
        y = x.sin()
        return y, Reversed.apply(y)

    expected = local(lambda: change_nothing(*make(X)))
    found = train(mesh, lambda: zrpc.rpc_sync("worker1", here(change_nothing), make(X)))
    torch.testing.assert_close(found[X], expected[X])


def test_a_detached_alias_that_is_changed_fails_what_needs_its_value(mesh: Mesh) -> None:
    def change_alias(y: Any, alias: Any) -> Any:
        result = (y * y).sum()
        alias.mul_(2)
        return result

    y = X.sin()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(mesh, lambda: zrpc.rpc_sync("worker1", here(change_alias), (y, y.detach())))


def test_views_outside_of_a_context_stay_views(mesh: Mesh) -> None:
    def gradient(a: Any, b: Any) -> Any:
        weight = torch.ones((), requires_grad=True)
        a.mul_(weight)
        [found] = torch.autograd.grad(b.sum(), [weight])
        return found

    base = torch.arange(6.0)
    for a, b, shared in [(base, base[2:4], 2), (base[2:4], base, 2), (base[:4], base[2:], 2)]:
        found = mesh.run(0, zrpc.rpc_sync, "worker1", here(gradient), (a, b))
        assert found == b[:shared].sum() if b is not base else b[2:4].sum()
