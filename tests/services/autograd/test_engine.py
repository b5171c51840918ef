"""What one worker's run of torch's engine leaves: gradients with memory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zrpc.services.autograd import engine
from zrpc.services.autograd.state import ContextState


@pytest.fixture(autouse=True, params=[False, True], ids=["returned", "accumulated"])
def _both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """The engine returns the gradients; or it accumulates them, as if any node has a hook."""
    if not request.param:
        yield
        return
    node: Any = torch.ones(1, requires_grad=True).view(1).grad_fn
    handle = node.register_hook(lambda *_: None)
    yield
    handle.remove()


def run(root: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    state = ContextState(0)
    engine.run([root], state.start, False, state)
    return state.gradients


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_gradient_that_the_engine_has_made_is_not_copied(name: str) -> None:
    """Both of a linear layer's are views of what the engine has made."""
    layer = torch.nn.Linear(8, 4)
    leaf = getattr(layer, name)
    places = []
    leaf.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    gradient = run(layer(torch.ones(2, 8)).sum())[leaf]
    assert [gradient.data_ptr()] == places
    gradient.detach_()  # which is refused for views


@pytest.mark.parametrize(
    "combine",
    [
        lambda one, other: one + other,
        lambda one, other: one.t() + other,
        lambda one, other: one.t() + other.t(),
        lambda one, other: (one.view(16) + other.view(16)).view(4, 4),
        lambda one, other: torch.stack([one, other]),
        lambda one, other: torch.cat([one.view(1, 16), other.view(1, 16)]),
    ],
    ids=["sum", "one transposed", "both transposed", "views", "stack", "cat"],
)
def test_gradients_of_two_leaves_share_no_memory(combine: Any) -> None:
    one, other = (torch.rand(4, 4, requires_grad=True) for _ in range(2))
    result = combine(one, other)
    found = run((result * torch.arange(result.numel()).view(result.shape)).sum())
    before = found[other].clone()
    found[one].zero_()
    assert torch.equal(found[other], before)


def test_a_gradient_that_a_hook_keeps_is_copied() -> None:
    leaf, kept = torch.rand(4, 4, requires_grad=True), []
    middle = leaf + torch.zeros(4, 4)
    middle.register_hook(kept.append)
    gradient = run((middle * 2).sum())[leaf]
    gradient.zero_()
    assert torch.equal(kept[0], torch.full((4, 4), 2.0))


def test_a_gradient_that_is_a_view_of_what_a_hook_keeps_is_copied() -> None:
    leaf, kept = torch.rand(4, 4, requires_grad=True), []
    middle = leaf.view(16)
    middle.register_hook(kept.append)
    gradient = run((middle * 2).sum())[leaf]
    gradient.zero_()
    assert torch.equal(kept[0], torch.full((16,), 2.0))


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (16,)])
def test_a_gradient_that_is_a_users_tensor_is_copied(saved: bool, shape: tuple[int, ...]) -> None:
    """Or a view of it."""
    constant = torch.ones(16)

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            if saved:
                ctx.save_for_backward(constant)
            return tensor.sum()

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            kept = ctx.saved_tensors[0] if saved else constant
            return kept if shape == kept.shape else kept.view(shape)

    leaf = torch.rand(shape, requires_grad=True)
    gradient = run(Constant.apply(leaf))[leaf]
    gradient.zero_()
    assert torch.equal(constant, torch.ones(16))


def frozen(layer: torch.nn.Linear) -> None:
    layer.weight.requires_grad_(False)


def cast(layer: torch.nn.Linear) -> None:
    layer.double()


@pytest.mark.parametrize("change", [frozen, cast])
def test_leaves_that_change_after_the_forward_pass_are_as_in_one_process(change: Any) -> None:
    def changed() -> tuple[torch.nn.Linear, torch.Tensor]:
        layer = torch.nn.Linear(4, 2)
        loss = layer(torch.ones(4)).sum()
        change(layer)
        return layer, loss

    alone, loss = changed()
    loss.backward()
    layer, loss = changed()
    found = run(loss)
    for expected, leaf in zip(alone.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(found.get(leaf), expected.grad)


def test_a_leaf_with_two_nodes_gets_the_gradients_of_both_once() -> None:
    """A leaf has another node after a change of its dtype."""
    leaf = torch.ones(3, requires_grad=True)
    before = (leaf * 2).sum()
    leaf.data = leaf.data.double()
    found = run(before + (leaf * 3).sum())
    torch.testing.assert_close(found[leaf], torch.full((3,), 5.0, dtype=torch.float64))


def test_a_dense_gradient_is_added_to_a_sparse_one() -> None:
    leaf, state = torch.ones(3, 2, requires_grad=True), ContextState(0)
    rows = torch.nn.functional.embedding(torch.tensor([0, 2]), leaf, sparse=True)
    engine.run([rows.sum()], state.start, False, state)
    engine.run([(leaf * 3).sum()], state.start, False, state)
    expected = torch.tensor([[4.0, 4.0], [3.0, 3.0], [4.0, 4.0]])
    torch.testing.assert_close(state.gradients[leaf], expected)
