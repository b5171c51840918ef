"""Hooks fire once with the whole gradient, as often as in one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook

from tests.services.autograd.split_models import (
    LEAVES,
    W,
    X,
    call,
    layer,
    leaf,
    local_gradients,
    residual,
    train,
)
from tests.support.waiting import SOON
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


class Seen(list[torch.Tensor]):
    """What a hook was called with."""

    def __call__(self, gradient: Any) -> None:
        self.append(gradient.clone())

    def once(self, expected: Any) -> None:
        torch.testing.assert_close([*self], [expected])


def on_accumulated(at: Any, seen: Any) -> Any:
    return at.register_post_accumulate_grad_hook(lambda p: seen(p.grad))


@pytest.mark.parametrize("register", [torch.Tensor.register_hook, on_accumulated])
def test_a_hook_on_a_parameter_fires_once_with_the_whole_gradient(
    mesh: Mesh, register: Any
) -> None:
    """The ``.grad`` from before is put back, also if the hook raises."""
    before = torch.full_like(W[1], 7)
    expected, seen = local_gradients(residual, W[:2]), [Seen(), Seen()]
    W[1].grad = before
    try:
        with (
            register(W[1], lambda _: 1 / 0),
            pytest.raises(RuntimeError, match="Error on Node 1: ZeroDivisionError"),
        ):
            train(mesh, residual)
        with register(W[0], seen[0]), register(W[1], seen[1]):
            found = train(mesh, residual)
        assert W[1].grad is before
        assert torch.equal(before, torch.full_like(before, 7))
        assert W[0].grad is None
    finally:
        W[1].grad = None
    for at, each, gradient in zip(W, seen, expected, strict=False):
        each.once(gradient)
        torch.testing.assert_close(found[at], gradient)


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("over", ["parameters", "parameters and activations", "unused too"])
def test_a_hook_over_several_tensors(mesh: Mesh, mode: Any, over: str) -> None:
    """Of ``torch.autograd.graph``; it fires once in a pass, and as it does locally."""
    one, other = leaf(3, 3, seed=21), leaf(3, 3, seed=22)
    calls: list[Any] = []
    handles = []

    def there(x: Any) -> Any:
        y = torch.tanh(x @ one)
        more = {"parameters and activations": [y], "unused too": [leaf(2, seed=23)]}.get(over, [])
        handles.append(register_multi_grad_hook([one, other, *more], calls.append, mode=mode))
        return y @ other + x @ other

    def model() -> Any:
        return (call("worker1", there, X) ** 2).sum()

    for run in (lambda: model().backward(), lambda: train(mesh, model)):
        run()
        handles.pop().remove()
    local, distributed = calls
    torch.testing.assert_close(distributed, local)
    X.grad = None


def test_hooks_on_activations_and_modules_fire_once_with_the_whole_gradient(mesh: Mesh) -> None:
    linear = torch.nn.Linear(3, 3).double()
    seen = {name: Seen() for name in ("sent", "received", "result", "module")}
    linear.register_full_backward_hook(lambda module, inputs, outputs: seen["module"](outputs[0]))

    def twice(x: Any) -> Any:
        x.register_hook(seen["received"])
        y = layer(1, linear(x))
        return y, y.sin()

    def model() -> Any:
        x = layer(0, X)
        x.register_hook(seen["sent"])
        first, second = call("worker1", twice, x)
        first.register_hook(seen["result"])
        return (first * second * x + call("worker2", layer, 2, first) + first).sum()

    local_gradients(model, LEAVES)
    expected = {name: each.pop() for name, each in seen.items()}
    train(mesh, model)
    for name, each in seen.items():
        each.once(expected[name])


def test_a_hook_that_waits_for_another_worker_holds_nobody_up(mesh: Mesh) -> None:
    """While a hook at one worker waits, a hook at another one runs."""
    other_ran = threading.Event()

    def wait(gradient: Any) -> None:
        assert other_ran.wait(SOON)

    def model() -> Any:
        return (call("worker1", layer, 1, X) + call("worker2", layer, 2, X)).sum()

    with W[1].register_hook(wait), W[2].register_hook(lambda g: other_ran.set()):
        train(mesh, model)
