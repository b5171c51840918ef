"""What one worker's run of torch's engine leaves in a context, and in ``.grad``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from zrpc.services.autograd import engine, nodes
from zrpc.services.autograd.nodes import OwnHook, any_registered
from zrpc.services.autograd.state import ContextState


def run(root: torch.Tensor, state: ContextState | None = None) -> dict[torch.Tensor, torch.Tensor]:
    state = state or ContextState(1)
    engine.run([root], state.start, False, state)
    return state.gradients


def accumulator_of(leaf: torch.Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]


def nothing(*_: Any) -> None: ...


# Gradients have memory of their own.


@pytest.fixture(params=[False, True], ids=["returned", "accumulated"])
def _both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """The engine returns the gradients; or it accumulates them, as if any node has a hook."""
    if not request.param:
        yield
        return
    node: Any = torch.ones(1, requires_grad=True).view(1).grad_fn
    handle = node.register_hook(nothing)
    yield
    handle.remove()


both_ways = pytest.mark.usefixtures("_both_ways")


@both_ways
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


@both_ways
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


@both_ways
def test_a_gradient_that_a_hook_keeps_is_copied() -> None:
    """Or a view of it."""
    leaf = torch.rand(4, 4, requires_grad=True)
    for middle in (leaf + torch.zeros(4, 4), leaf.view(16)):
        kept: list[torch.Tensor] = []
        middle.register_hook(kept.append)
        run((middle * 2).sum())[leaf].zero_()
        assert torch.equal(kept[0], torch.full_like(middle, 2.0))


@both_ways
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
    run(Constant.apply(leaf))[leaf].zero_()
    assert torch.equal(constant, torch.ones(16))


# Leaves of which some differ from what they were in the forward pass.


@both_ways
@pytest.mark.parametrize(
    "change", [lambda layer: layer.weight.requires_grad_(False), torch.nn.Module.double]
)
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


@both_ways
def test_a_leaf_with_two_nodes_gets_the_gradients_of_both_once() -> None:
    """A leaf has another node after a change of its dtype."""
    leaf = torch.ones(3, requires_grad=True)
    before = (leaf * 2).sum()
    leaf.data = leaf.data.double()
    found = run(before + (leaf * 3).sum())
    torch.testing.assert_close(found[leaf], torch.full((3,), 5.0, dtype=torch.float64))


@both_ways
def test_a_dense_gradient_is_added_to_a_sparse_one() -> None:
    leaf, state = torch.ones(3, 2, requires_grad=True), ContextState(0)
    run(torch.nn.functional.embedding(torch.tensor([0, 2]), leaf, sparse=True).sum(), state)
    found = run((leaf * 3).sum(), state)
    torch.testing.assert_close(found[leaf], torch.tensor([[4.0, 4.0], [3.0, 3.0], [4.0, 4.0]]))


# Hooks on the nodes of leaves, and DDP's reducers.


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise ValueError("in a node")


class Precise(torch.autograd.Function):
    """Its gradient has another dtype than its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.float().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.full((3,), 1.001)


@pytest.fixture
def leaf() -> torch.Tensor:
    leaf = torch.rand(3, requires_grad=True)
    leaf.grad = torch.full((3,), 7.0)
    return leaf


def test_a_gradient_in_a_bucket_that_the_reducer_overwrites(
    monkeypatch: pytest.MonkeyPatch, leaf: torch.Tensor
) -> None:
    """DDP makes ``.grad`` a view of its bucket if it is asked to."""
    monkeypatch.setattr(engine.ddp, "reduced_with", lambda leaves: [leaf])
    bucket = leaf.grad
    assert bucket is not None

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        bucket.copy_(parameter.grad)
        parameter.grad = bucket

    leaf.register_post_accumulate_grad_hook(reduce)
    torch.testing.assert_close(run((leaf * 2).sum())[leaf], torch.full((3,), 2.0))
    torch.testing.assert_close(leaf.grad, torch.full((3,), 7.0))


@pytest.mark.parametrize("register", ["post_accumulate_grad_hook", "hook"])
def test_what_a_hook_has_used_up_is_neither_in_the_context_nor_in_grad(
    leaf: torch.Tensor, register: str
) -> None:
    """An optimizer in a hook on the leaf, as in torch's recipe, or on its node, uses it up."""
    before, node, used = leaf.grad, accumulator_of(leaf), []

    def use_up(*_: Any) -> None:
        assert leaf.grad is not None
        used.append(leaf.grad[0].item())
        leaf.grad = None

    at = leaf if register.startswith("post") else node
    handle = getattr(at, f"register_{register}")(use_up)
    state = ContextState(1)
    for factor in (2, 3):
        assert run((leaf * factor).sum(), state) == {}
    handle.remove()
    assert leaf.grad is before
    assert used == [2.0, 3.0]


@pytest.mark.parametrize("has_hook", [False, True])
def test_no_hooks_of_a_run_stay_on_a_node(leaf: torch.Tensor, has_hook: bool) -> None:
    if has_hook:
        leaf.register_post_accumulate_grad_hook(nothing)
    node = accumulator_of(leaf)
    for fails in (False, True):
        root = (leaf * 2).sum()
        if fails:
            with pytest.raises(ValueError, match="in a node"):
                run(Failing.apply(root))
        else:
            run(root)
        for register in (node.register_prehook, node.register_hook):
            handle = register(nothing)
            assert len(handle.hooks_dict_ref()) == 1
            handle.remove()


def test_grad_is_put_back_after_a_hook_has_failed_though_a_debugger_keeps_all_frames(
    leaf: torch.Tensor,
) -> None:
    before, frames = leaf.grad, []
    leaf.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    root = (leaf * 2).sum()
    profile = sys.getprofile()
    sys.setprofile(lambda frame, *_: frames.append(frame))
    try:
        with pytest.raises(ZeroDivisionError):
            run(root)
    finally:
        sys.setprofile(profile)
    assert leaf.grad is before


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="new in torch 2.10")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_a_leaf_with_hooks_may_have_gradients_of_another_dtype(dtype: torch.dtype | None) -> None:
    leaf = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    leaf.grad_dtype = dtype
    leaf.register_post_accumulate_grad_hook(nothing)
    state, precise = ContextState(1), Precise.apply(leaf)
    for _ in range(2):
        engine.run([precise], state.start, True, state)
    torch.testing.assert_close(state.gradients[leaf], torch.full((3,), 2.002))


@pytest.mark.parametrize("register", ["post_accumulate_grad_hook", "hook"])
@pytest.mark.parametrize("same", [True, False], ids=["same context", "other context"])
def test_a_hook_may_run_a_pass_over_its_own_leaf(
    leaf: torch.Tensor, register: str, same: bool
) -> None:
    before, node, seen = leaf.grad, accumulator_of(leaf), []
    first = ContextState(1)
    second = first if same else ContextState(2)

    @torch.enable_grad()
    def again(*_: Any) -> None:
        assert leaf.grad is not None
        seen.append(leaf.grad[0].item())
        if len(seen) == 1:
            run((leaf * 3).sum(), second)
            seen.append(leaf.grad[0].item())

    at = leaf if register.startswith("post") else node
    handle = getattr(at, f"register_{register}")(again)
    [outcome] = start_all([lambda: run((leaf * 2).sum(), first)], SOON)()
    assert outcome.keys() == {leaf}
    handle.remove()
    assert leaf.grad is before
    assert seen == ([2.0, 5.0, 5.0] if same else [2.0, 3.0, 2.0])
    found = first.gradients[leaf] if same else first.gradients[leaf] + second.gradients[leaf]
    torch.testing.assert_close(found, torch.full((3,), 5.0))


# Whether a program has hooks on nodes is known without a look at any node.


@pytest.fixture
def _no_hooks() -> Iterator[None]:
    until(lambda: not any_registered(), "the hooks of other tests are gone", collect=True)
    yield
    assert not any_registered()


@pytest.mark.usefixtures("_no_hooks")
@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_a_hook_counts_until_it_is_removed_or_its_node_is_freed(register: str) -> None:
    leaf = torch.rand(3, requires_grad=True)
    node = accumulator_of(leaf)
    own = getattr(node, register)(OwnHook(nothing))
    assert not any_registered()
    assert not engine.must_run([leaf])
    own.remove()
    handles = [getattr(node, register)(nothing) for _ in range(2)]
    for handle in handles:
        assert engine.must_run([leaf])
        handle.remove()
    assert not any_registered()
    getattr(node, register)(nothing)
    assert any_registered()
    del node
    assert not any_registered()


def test_hooks_may_be_there_if_some_were_registered_before_zrpc() -> None:
    """Here, before the module runs once more."""
    accumulator_of(torch.rand(3, requires_grad=True)).register_hook(nothing).remove()
    assert runpy.run_path(nodes.__file__)["any_registered"]()
