"""Graphs of any form over several workers have the gradients of one process; and their roots."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    UNKNOWN,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    gradients,
    gradients_at,
    holders,
    layer,
    leaf,
    local_gradients,
    round_trip,
    there_and_back,
)
from tests.support.identity import here
from tests.support.waiting import SOON
from zrpc.agent.current import find_agent
from zrpc.testing import Mesh
from zrpc.torch_internals import storage_uses, tensor_uses

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def test_values_from_outside_of_the_context_are_leaves_where_they_are(caller: Mesh) -> None:
    made = (torch.ones, (3,), {"requires_grad": True})
    received, rref = zrpc.rpc_sync("worker1", *made), zrpc.remote("worker1", *made)
    with dist_autograd.context() as context_id:
        loss = call("worker1", lambda x: x * 3, received) * rref.to_here()
        dist_autograd.backward(context_id, [loss.sum()])
        for rank in (0, 1):
            [found] = gradients_at(caller, rank, context_id).values()
            assert found.tolist() == [3.0] * 3
        assert received in gradients_at(caller, 0, context_id)


def checkpointed(rank: Any, x: Any, **options: Any) -> Any:
    return checkpoint(layer, rank, x, **options)


def checkpoints_in_a_stage() -> Any:
    x = call("worker1", checkpointed, 1, X * 2, use_reentrant=False)
    return (checkpointed(0, x, use_reentrant=False) * x).sum()


def a_stage_in_a_checkpoint() -> Any:
    def stage(x: Any) -> Any:
        return call("worker1", layer, 1, x.sin()).sin()

    return checkpoint(stage, X * 2, use_reentrant=False).sum()


def changed_in_place() -> Any:
    """What was received; and what was sent, whose message has a copy."""

    def change(x: Any, y: Any) -> Any:
        x.mul_(2).add_(y)
        y[0] = x[1]
        return x, y

    sent = X * 2
    x, y = call("worker1", change, sent, X.sin())
    x += y
    y.clamp_(-0.5, 0.5)
    return (x * y * sent.add_(x.detach())).sum()


def without_grad() -> Any:
    """A tensor that is sent within ``no_grad`` is not followed from there on."""
    x = layer(0, X)
    with torch.no_grad():
        constant = call("worker1", torch.sin, x)
    return (call("worker1", layer, 1, x) * constant).sum()


def a_call_in_inference_mode() -> Any:
    """What comes from there is used as a constant; the context goes on."""

    other = leaf(3, 3, seed=5)

    def there(x: Any) -> Any:
        with torch.inference_mode():
            scale = call("worker2", torch.matmul, x, other)
        return x @ W[1] * scale.clone()

    return (call("worker1", there, layer(0, X)) + call("worker1", layer, 1, X)).sum()


def nodes_of_new_threads() -> Any:
    """The first has the lowest sequence number; worker1 needs its gradient before it answers."""
    results: list[torch.Tensor] = []

    def in_new_thread(fn: Any, *args: Any) -> Any:
        thread = threading.Thread(target=lambda: results.append(fn(*args)))
        thread.start()
        thread.join(SOON)
        return results.pop()

    y = call("worker1", layer, 1, X.sin())
    z = in_new_thread(torch.tanh, y)
    return sum(in_new_thread(torch.mul, z, factor).sum() for factor in range(1, 9))


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


def unused_outputs() -> Any:
    _, used, order = call("worker1", lambda x: Split.apply(layer(1, x)), X)
    assert not order.requires_grad
    return used.sum()


class Nested(torch.autograd.Function):
    """Has torch differentiate in the backward pass, and calls there."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            [found] = torch.autograd.grad(x.exp(), x, gradient)
        return call("worker2", torch.mul, found, 2)


def functions_that_call() -> Any:
    return call("worker1", lambda x: Nested.apply(layer(1, x)), Nested.apply(X)).sum()


MODELS = [
    lambda: layer(0, X).sum(),
    checkpoints_in_a_stage,
    a_stage_in_a_checkpoint,
    changed_in_place,
    without_grad,
    a_call_in_inference_mode,
    nodes_of_new_threads,
    unused_outputs,
    functions_that_call,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_model_has_the_gradients_of_one_process(mesh: Mesh, model: Callable[[], Any]) -> None:
    assert_as_local(mesh, model, LEAVES)


class Shifted:
    """A value that torch computes on where it arrives."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return _shifted, (self.tensor,)


def _shifted(tensor: Any) -> Any:
    return Shifted(tensor + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_result_that_is_waited_for_without_grad(mesh: Mesh, mode: Any) -> None:
    def model() -> Any:
        if find_agent() is None:
            return (_shifted(layer(1, X)).tensor ** 2).sum()
        future = zrpc.rpc_async("worker1", here(lambda x: Shifted(layer(1, x))), (X,))
        with mode():
            result = future.wait()
        return (result.tensor**2).sum()

    assert_as_local(mesh, model, LEAVES)


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def default_device() -> Any:
    return torch.device("meta")


def check(found: Any) -> None:
    for at, expected in zip(LEAVES, local_gradients(round_trip, LEAVES), strict=True):
        torch.testing.assert_close(found[at], expected)


@pytest.mark.parametrize("defaults", [default_device, default_dtype])
def test_defaults_of_a_thread_do_not_matter(caller: Mesh, defaults: Any) -> None:
    """Neither where a pass begins, nor those of a handler."""

    def there(x: Any) -> Any:
        with defaults():
            return there_and_back(x)

    with defaults(), dist_autograd.context() as context_id:
        x = layer(0, X)
        dist_autograd.backward(context_id, [(x + call("worker1", there, x)).sum()])
        check(gradients(caller, context_id))
    assert_freed(caller)


def test_a_context_that_begins_in_inference_mode(caller: Mesh) -> None:
    """Its first message is sent there, outside of the graph."""
    block = dist_autograd.context()
    with torch.inference_mode():
        context_id = block.__enter__()
        call("worker1", layer, 1, X)
    try:
        dist_autograd.backward(context_id, [round_trip()])
        check(gradients(caller, context_id))
    finally:
        block.__exit__(None, None, None)


def test_a_pass_in_inference_mode(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        loss = round_trip()
        with torch.inference_mode():
            dist_autograd.backward(context_id, [loss])
        check(gradients(caller, context_id))


def test_tensors_of_one_message_can_have_passes_of_their_own(caller: Mesh) -> None:
    """The branches of the others are neither run nor freed."""
    leaves = [torch.full((2,), 1.0 + i, requires_grad=True) for i in range(4)]
    with dist_autograd.context() as context_id:
        results = call("worker1", lambda xs: [x.pow(2) for x in xs], [x.sin() for x in leaves])
        for used in ([2], [0, 3], [1]):
            dist_autograd.backward(context_id, [torch.stack([results[i] for i in used]).sum()])
        found = dist_autograd.get_gradients(context_id)
    for x in leaves:
        torch.testing.assert_close(found[x], (2 * x.sin() * x.cos()).detach())


@pytest.mark.parametrize("count", [1, 3])
def test_a_context_keeps_no_memory_of_tensors_that_were_sent(caller: Mesh, count: int) -> None:
    x = torch.ones(2, requires_grad=True)
    sums = [x + i for i in range(count)]
    before = [(tensor_uses(each), storage_uses(each.untyped_storage())) for each in sums]
    with dist_autograd.context():
        call("worker1", len, sums)
        after = [(tensor_uses(each), storage_uses(each.untyped_storage())) for each in sums]
    assert after == before


# The roots of a pass: those that are refused, and RRefs.

ONES = torch.ones(2, requires_grad=True)
NO_SCALAR = "is not a scalar, all roots need to be scalar"
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([], RuntimeError, "No tensors provided for gradient computation"),
    ([torch.ones(())], RuntimeError, "requires_grad not set on root"),
    ([ONES * 2], RuntimeError, NO_SCALAR),
    ([ONES[:0] * 2], RuntimeError, NO_SCALAR),
    ([ONES.sum(), ONES * 2], RuntimeError, NO_SCALAR),
    ([torch.ones((), requires_grad=True)], RuntimeError, "have a valid gradient function"),
    (None, TypeError, "incompatible function arguments"),
    (ONES.sum(), TypeError, "incompatible function arguments"),
    ([1.0], TypeError, "incompatible function arguments"),
]


def test_roots_that_are_refused(caller: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch would import this module, and sympy, to compare a root with a gradient of it.
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    with dist_autograd.context() as context_id:
        good = call("worker1", layer, 1, X).sum()
        for roots, kind, text in REFUSED:
            with pytest.raises(kind, match=text):
                dist_autograd.backward(context_id, roots)
        assert dist_autograd.get_gradients(context_id) == {}
        dist_autograd.backward(context_id, (good,))  # a tuple
        assert set(dist_autograd.get_gradients(context_id)) == {X}


def test_a_root_of_one_element_in_any_shape(mesh: Mesh) -> None:
    def model() -> Any:
        return [call("worker1", layer, 1, X).sum().reshape(1, 1, 1), X[:1] * 2]

    assert_as_local(mesh, model, LEAVES)


def test_a_complex_root(caller: Mesh) -> None:
    """Its gradient is one, as for a real root; torch alone asks for it."""
    with dist_autograd.context() as context_id:
        z = leaf(1, dtype=torch.complex64)
        dist_autograd.backward(context_id, [call("worker1", torch.mul, z, 2j).sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[z], torch.tensor([-2j]))


def test_the_older_form_takes_the_current_context(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward([call("worker1", layer, 1, X).sum()])
        assert holders(caller, context_id) == [{X}, {W[1]}, set()]
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        dist_autograd.backward([X.sum()])


def make_loss(x: Any) -> Any:
    return layer(1, x).sum()


def run_backward(rref: zrpc.RRef[torch.Tensor], context_id: int, retain_graph: bool) -> None:
    assert rref.backward(context_id, retain_graph) is None


def test_backward_of_an_rref_at_any_worker(caller: Mesh) -> None:
    """Another user of it, its owner and a third worker; then its graph is gone."""
    with dist_autograd.context() as context_id:
        loss = zrpc.remote("worker1", make_loss, (X * 2,))
        for to, retain_graph in (0, True), (1, True), (2, False):
            call(f"worker{to}", run_backward, loss, context_id, retain_graph)
        assert holders(caller, context_id) == [{X}, {W[1]}, set()]
        found = gradients(caller, context_id)
        with pytest.raises(RuntimeError, match="graph a second time: an earlier pass"):
            loss.backward(dist_autograd_ctx_id=context_id)
    expected = torch.autograd.grad(make_loss(X * 2), [X, W[1]])
    torch.testing.assert_close([found[X], found[W[1]]], [3 * each for each in expected])
    assert X.grad is None
    assert W[1].grad is None


def test_backward_of_an_rref_without_context(caller: Mesh) -> None:
    w = leaf(3, seed=5)
    zrpc.RRef((w**2).sum()).backward()
    user = zrpc.remote("worker1", make_loss, (X.detach(),))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be"):
        user.backward()
    torch.testing.assert_close(w.grad, 2 * w.detach())


def test_errors_of_rrefs_come_from_the_owner(caller: Mesh) -> None:
    no_tensor = r"RRef should contain a tensor for \.backward\(\)"
    with dist_autograd.context() as context_id:
        for rref, text in (
            (zrpc.RRef([X]), no_tensor),
            (zrpc.remote("worker1", list, ([X],)), no_tensor),
            (zrpc.remote("worker1", torch.sin, (X,)), "is not a scalar"),
            (zrpc.remote("worker1", torch.ones, (1,)), "requires_grad not set on root"),
        ):
            with pytest.raises(RuntimeError, match=text):
                rref.backward(context_id)
        with pytest.raises(RuntimeError, match=UNKNOWN):
            zrpc.remote("worker1", make_loss, (X,)).backward(context_id + 1)
    with pytest.raises(RuntimeError, match=no_tensor):
        zrpc.RRef("text").backward()
