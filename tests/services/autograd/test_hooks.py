"""Hooks fire once with the whole gradient; nodes run once, and only if they lead to the roots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook

from tests.services.autograd.split_models import (
    LEAVES,
    SOON,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    layer,
    leaf,
    local_gradients,
    residual,
    train,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


class Seen:
    """What a hook was called with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.gradients = []

    def __call__(self, gradient: Any) -> None:
        with self._lock:
            self.gradients.append(gradient.clone())

    def once(self, expected: Any) -> None:
        assert len(self.gradients) == 1
        torch.testing.assert_close(self.gradients[0], expected)


def on_tensor(at: Any, seen: Any) -> Any:
    return at.register_hook(lambda g: seen(g))


def on_accumulated(at: Any, seen: Any) -> Any:
    return at.register_post_accumulate_grad_hook(lambda p: seen(p.grad))


def on_node(at: Any, seen: Any) -> Any:
    node = at.view_as(at).grad_fn.next_functions[0][0]
    return Kept(node, node.register_hook(lambda inputs, outputs: seen(outputs[0])))


def before_node(at: Any, seen: Any) -> Any:
    node = at.view_as(at).grad_fn.next_functions[0][0]
    return Kept(node, node.register_prehook(lambda gradients: seen(gradients[0])))


class Kept:
    """A hook on a node, which lives as long as somebody has it."""

    def __init__(self, node: Any, handle: Any) -> None:
        self.node, self.handle = node, handle

    def remove(self) -> None:
        self.handle.remove()
        self.node = None


@contextmanager
def hooks(register: Any, *leaves: Any) -> Iterator[Any]:
    with ExitStack() as stack:
        seen = []
        for at in leaves:
            seen.append(Seen())
            stack.callback(register(at, seen[-1]).remove)
        yield seen


REGISTER = pytest.mark.parametrize(
    "register", [on_tensor, on_accumulated, on_node, before_node], ids=lambda f: f.__name__
)


@REGISTER
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_on_a_parameter_fires_once_with_the_whole_gradient(
    mesh: Mesh, register: Any, rank: int
) -> None:
    [expected] = local_gradients(residual, [W[rank]])
    with hooks(register, W[rank]) as [seen]:
        found = train(mesh, residual)
    seen.once(expected)
    torch.testing.assert_close(found[W[rank]], expected)
    assert W[rank].grad is None


def test_a_tensor_hook_that_changes_the_gradient(mesh: Mesh) -> None:
    with W[1].register_hook(lambda g: g * 10):
        assert_as_local(mesh, residual, LEAVES)


@REGISTER
def test_a_gradient_from_before_is_put_back(mesh: Mesh, register: Any) -> None:
    before = torch.full_like(W[1], 7)
    [expected] = local_gradients(residual, [W[1]])
    W[1].grad = before
    try:
        with hooks(register, W[1]) as [seen]:
            found = train(mesh, residual)
        assert W[1].grad is before
        assert torch.equal(before, torch.full_like(before, 7))
    finally:
        W[1].grad = None
    seen.once(expected)
    torch.testing.assert_close(found[W[1]], expected)


def in_backward(w: Any, optimizer: Any) -> Any:
    """torch's recipe of an optimizer step within the backward pass."""

    def step(_: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return w.register_post_accumulate_grad_hook(step)


def in_backward_on_node(w: Any, optimizer: Any) -> Any:
    """The same as ``torch.distributed.optim._apply_optimizer_in_backward`` does it."""
    node = w.view_as(w).grad_fn.next_functions[0][0]

    def step(*_: Any) -> None:
        optimizer.step()
        w.grad = None

    return Kept(node, node.register_hook(step))


@pytest.mark.parametrize("register", [in_backward, in_backward_on_node], ids=lambda f: f.__name__)
def test_an_optimizer_in_a_hook_that_clears_the_gradient(mesh: Mesh, register: Any) -> None:
    """What a hook has used up is neither in the context nor in ``.grad``."""
    ways = []
    for run in (train, lambda _, model: model().backward()):
        w = leaf(3, 3, seed=20)
        kept = register(w, torch.optim.Adam([w], lr=0.5))

        def model(w: Any = w) -> Any:
            x = call("worker1", lambda x: x @ w, X.detach())
            return call("worker1", lambda x: (x @ w).sum(), call("worker2", torch.tanh, x))

        for _ in range(3):
            found = run(mesh, model)
            assert w.grad is None
        ways.append(w.detach())
        kept.remove()
        assert not found
    torch.testing.assert_close(*ways)


def test_a_hook_sees_the_gradients_of_earlier_passes(mesh: Mesh) -> None:
    """A context's gradient is to its passes what ``.grad`` is to local ones."""
    [expected] = local_gradients(residual, [W[1]])
    seen = []
    with W[1].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())):
        found = train(mesh, residual, passes=2)
    torch.testing.assert_close(seen, [expected, expected * 2])
    torch.testing.assert_close(found[W[1]], expected * 2)


@REGISTER
def test_a_hook_that_raises_leaves_the_parameter_as_it_was(mesh: Mesh, register: Any) -> None:
    before = torch.full_like(W[1], 7)
    W[1].grad = before

    def fail(_: Any) -> None:
        raise ValueError("in a hook")

    try:
        handle = register(W[1], fail)
        with pytest.raises(RuntimeError, match="in a hook"):
            train(mesh, residual)
        handle.remove()
        assert W[1].grad is before
        assert torch.equal(before, torch.full_like(before, 7))
    finally:
        W[1].grad = None
    assert_freed(mesh)
    with hooks(register, W[1]) as [seen]:
        assert_as_local(mesh, residual, LEAVES)
    assert seen.gradients


@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("over", ["parameters", "parameters and activations", "unused too"])
def test_a_hook_over_several_tensors(mesh: Mesh, mode: Any, over: str) -> None:
    """Of ``torch.autograd.graph``; it fires once in a pass, and as it does locally."""
    one, other = leaf(3, 3, seed=21), leaf(3, 3, seed=22)
    calls: list[Any] = []
    handles = []

    def seen(gradients: Any) -> None:
        calls.append(gradients)

    def there(x: Any) -> Any:
        y = torch.tanh(x @ one)
        tensors = [one, other]
        if over == "parameters and activations":
            tensors.append(y)
        if over == "unused too":
            tensors.append(leaf(2, seed=23))
        handles.append(register_multi_grad_hook(tensors, seen, mode=mode))
        return y @ other + x @ other

    def model() -> Any:
        return (call("worker1", there, X) ** 2).sum()

    for run in (lambda: model().backward(), lambda: train(mesh, model)):
        run()
        handles.pop().remove()
    local, distributed = calls
    torch.testing.assert_close(distributed, local)
    X.grad = one.grad = other.grad = None


class Reducing(torch.autograd.Function):
    """Has a callback run after the engine's run, as reducers do."""

    order: list[str]

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: Reducing.order.append("callback"))
        return gradient


def test_a_callback_after_the_run_sees_what_all_nodes_have_accumulated(mesh: Mesh) -> None:
    one, other = leaf(3, 3, seed=24), leaf(3, 3, seed=25)
    Reducing.order = []
    for parameter, name in ((one, "one"), (other, "other")):
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: Reducing.order.append(name)
        )

    def model() -> Any:
        return call("worker1", lambda x: Reducing.apply(x @ one @ other).sum(), X.detach())

    train(mesh, model)
    assert Reducing.order == ["other", "one", "callback"]


@pytest.mark.parametrize("where", ["sent", "received", "result"])
def test_a_hook_on_an_activation_fires_once_with_the_whole_gradient(mesh: Mesh, where: str) -> None:
    seen = Seen()

    def twice(x: Any) -> Any:
        if where == "received":
            x.register_hook(seen)
        y = layer(1, x)
        return y, y.sin()

    def model() -> Any:
        x = layer(0, X)
        if where == "sent":
            x.register_hook(seen)
        first, second = call("worker1", twice, x)
        if where == "result":
            first.register_hook(seen)
        return (first * second * x + call("worker2", layer, 2, first) + first).sum()

    local_gradients(model, LEAVES)
    [expected] = seen.gradients
    seen.gradients.clear()
    train(mesh, model)
    seen.once(expected)


def test_module_hooks(mesh: Mesh) -> None:
    linear = torch.nn.Linear(3, 3).double()
    seen = Seen()
    linear.register_full_backward_hook(lambda module, inputs, outputs: seen(outputs[0]))

    def model() -> Any:
        return (call("worker1", lambda x: linear(x.sin()), X) ** 2).sum()

    local_gradients(model, LEAVES)
    [expected] = seen.gradients
    seen.gradients.clear()
    train(mesh, model)
    seen.once(expected)


def test_a_hook_that_waits_for_another_worker_holds_nobody_up(mesh: Mesh) -> None:
    """While a hook at one worker waits, a hook at another one runs."""
    other_ran = threading.Event()

    def wait(gradient: Any) -> None:
        assert other_ran.wait(SOON)

    def model() -> Any:
        x = call("worker1", layer, 1, X)
        y = call("worker2", layer, 2, X)
        return (x + y).sum()

    handles = [W[1].register_hook(wait), W[2].register_hook(lambda g: other_ran.set())]
    try:
        train(mesh, model)
    finally:
        for handle in handles:
            handle.remove()


class Counted(torch.autograd.Function):
    """The cube, which counts its runs."""

    forwards = 0
    backwards = 0
    lock = threading.Lock()

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        with Counted.lock:
            Counted.forwards += 1
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with Counted.lock:
            Counted.backwards += 1
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


@pytest.fixture
def counted() -> Any:
    Counted.forwards = Counted.backwards = 0
    return Counted


def cubed(rank: Any, x: Any) -> Any:
    return Counted.apply(layer(rank, x))


def test_each_node_runs_once_in_a_pass(mesh: Mesh, counted: Any) -> None:
    def model() -> Any:
        x = Counted.apply(X)
        for hop in range(8):
            rank = 1 + hop % 2
            x = x + call(f"worker{rank}", cubed, rank, x) * 0.1
        return x.sum()

    train(mesh, model)
    assert (counted.forwards, counted.backwards) == (9, 9)
    assert_as_local(mesh, model, LEAVES)


class Split(torch.autograd.Function):
    """Several outputs, not all of them differentiable, without gradients for unused ones."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        return x.sin(), x * 2, order

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, order: Any) -> Any:
        assert first is None
        return second * 2


def test_a_custom_function_with_unused_outputs(mesh: Mesh) -> None:
    def there(x: Any) -> Any:
        return Split.apply(layer(1, x))

    def model() -> Any:
        _, used, order = call("worker1", there, X)
        assert not order.requires_grad
        return used.sum()

    # Copies are nodes of their own, which would give the unused output a gradient of None too.
    assert_as_local(mesh, model, LEAVES)


def test_a_function_that_is_differentiated_by_torch_within_backward(mesh: Mesh) -> None:
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(x.exp(), x, gradient)[0]

    def model() -> Any:
        return call("worker1", lambda x: Nested.apply(layer(1, x)), Nested.apply(X)).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_call_in_a_backward_function(mesh: Mesh) -> None:
    """Code of the backward pass may call, also where it is run for another worker."""

    class Far(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return call("worker2", torch.mul, gradient, 2)

    def model() -> Any:
        return call("worker1", lambda x: Far.apply(layer(1, x)), Far.apply(X)).sum()

    assert_as_local(mesh, model, LEAVES)
