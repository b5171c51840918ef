"""The roots of a pass: those that are refused, and RRefs."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    UNKNOWN,
    W,
    X,
    assert_as_local,
    call,
    gradients_at,
    layer,
    leaf,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

# Roots that are tensors.


def roots_that_fail() -> Any:
    ones = torch.ones(2, requires_grad=True)
    return {
        "none": ([], RuntimeError, "No tensors provided for gradient computation"),
        "no grad": ([torch.ones(())], RuntimeError, "requires_grad not set on root"),
        "no scalar": ([ones * 2], RuntimeError, "is not a scalar, all roots need to be scalar"),
        "empty": ([ones[:0] * 2], RuntimeError, "is not a scalar, all roots need to be scalar"),
        "a leaf": (
            [torch.ones((), requires_grad=True)],
            RuntimeError,
            "does not have a valid gradient function",
        ),
        "second no scalar": ([ones.sum(), ones * 2], RuntimeError, "is not a scalar"),
        "None": (None, TypeError, "incompatible function arguments"),
        "a tensor": (ones.sum(), TypeError, "incompatible function arguments"),
        "numbers": ([1.0], TypeError, "incompatible function arguments"),
    }


@pytest.mark.parametrize("case", list(roots_that_fail()))
def test_roots_that_are_refused(caller: Mesh, case: Any) -> None:
    roots, kind, text = roots_that_fail()[case]

    with dist_autograd.context() as context_id:
        good = call("worker1", layer, 1, X).sum()
        with pytest.raises(kind, match=text):
            dist_autograd.backward(context_id, roots)
        assert dist_autograd.get_gradients(context_id) == {}
        dist_autograd.backward(context_id, [good])
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


def test_a_first_pass_does_not_wait_for_an_import(
    caller: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would import this module, and sympy, to compare a root with a gradient of it."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)

    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [call("worker1", layer, 1, X).sum()])
        assert set(dist_autograd.get_gradients(context_id)) == {X}


def test_roots_in_a_tuple(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, (call("worker1", layer, 1, X).sum(),))
        assert set(dist_autograd.get_gradients(context_id)) == {X}


def test_the_older_form_takes_the_current_context(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward([call("worker1", layer, 1, X).sum()])
        mine, there = gradients_at(caller, 0, context_id), gradients_at(caller, 1, context_id)
    assert set(mine) == {X}
    assert set(there) == {W[1]}


def test_the_older_form_outside_of_a_context(mesh: Mesh) -> None:
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        mesh.run(0, dist_autograd.backward, [X.sum()])


# RRef.backward.


def make_loss(x: Any) -> Any:
    return layer(1, x).sum()


def test_backward_of_an_rref_at_a_user(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        loss = zrpc.remote("worker1", make_loss, (X * 2,))
        assert loss.backward(context_id) is None
        mine, there = gradients_at(caller, 0, context_id), gradients_at(caller, 1, context_id)
    expected = torch.autograd.grad(make_loss(X * 2), [X, W[1]])
    torch.testing.assert_close([mine[X], there[W[1]]], list(expected))
    assert X.grad is None
    assert W[1].grad is None


def test_backward_of_an_rref_at_its_owner(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        loss = zrpc.RRef(call("worker1", make_loss, X * 2))
        loss.backward(dist_autograd_ctx_id=context_id)
        mine, there = gradients_at(caller, 0, context_id), gradients_at(caller, 1, context_id)
    expected = torch.autograd.grad(make_loss(X * 2), [X, W[1]])
    torch.testing.assert_close([mine[X], there[W[1]]], list(expected))


def test_backward_of_an_rref_at_a_third_worker(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        loss = zrpc.remote("worker1", make_loss, (X * 2,))
        call("worker2", lambda rref: rref.backward(context_id), loss)
        assert [set(gradients_at(caller, rank, context_id)) for rank in range(3)] == [
            {X},
            {W[1]},
            set(),
        ]


def test_backward_of_an_rref_twice(caller: Mesh) -> None:
    [expected] = torch.autograd.grad(make_loss(X * 2), [X])
    with dist_autograd.context() as context_id:
        loss = zrpc.remote("worker1", make_loss, (X * 2,))
        loss.backward(context_id, retain_graph=True)
        loss.backward(context_id, True)
        loss.backward(context_id)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward(context_id)
        torch.testing.assert_close(gradients_at(caller, 0, context_id)[X], 3 * expected)


def test_backward_of_an_rref_without_context(caller: Mesh) -> None:
    w = leaf(3, seed=5)

    zrpc.RRef((w**2).sum()).backward()
    user = zrpc.remote("worker1", make_loss, (X.detach(),))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be"):
        user.backward()
    torch.testing.assert_close(w.grad, 2 * w.detach())


def test_rrefs_without_a_tensor_have_no_backward(caller: Mesh) -> None:
    text = r"RRef should contain a tensor for \.backward\(\)"

    with dist_autograd.context() as context_id:
        with pytest.raises(RuntimeError, match=text):
            zrpc.RRef([X]).backward(context_id)
        with pytest.raises(RuntimeError, match=text):
            zrpc.remote("worker1", list, ([X],)).backward(context_id)
    with pytest.raises(RuntimeError, match=text):
        zrpc.RRef("text").backward()


def test_errors_of_roots_come_from_the_owner(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        with pytest.raises(RuntimeError, match="is not a scalar"):
            zrpc.remote("worker1", torch.sin, (X,)).backward(context_id)
        with pytest.raises(RuntimeError, match="requires_grad not set on root"):
            zrpc.remote("worker1", torch.ones, (1,)).backward(context_id)
        with pytest.raises(RuntimeError, match=UNKNOWN):
            zrpc.remote("worker1", make_loss, (X,)).backward(context_id + 1)
