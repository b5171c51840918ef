"""Who may use ``.grad`` of which leaves, and how a run of the engine lends it to a context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.waiting import SOON, pending, until
from zrpc.errors import RpcError
from zrpc.services.autograd import engine, grad_lock
from zrpc.services.autograd.grad_lock import GradLock, Use
from zrpc.services.autograd.state import ContextState

A, B = torch.zeros(1), torch.zeros(1)
# How long the tests watch that something does not happen.
NOT_YET = 0.1


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
    held([A, B], Use.RUN, None).close()  # which would be an error if either had a user


def held(leaves: list[torch.Tensor], use: Use, context_id: int | None) -> ExitStack:
    lock = ExitStack()
    lock.enter_context(GradLock(leaves, use, context_id))
    return lock


def waits(future: Future[ExitStack]) -> bool:
    return pending(future, NOT_YET)


def waiting_step(pool: ThreadPoolExecutor, leaves: list[torch.Tensor]) -> Future[ExitStack]:
    """A step of context 9 that waits."""
    before = len(grad_lock._waiting)
    future = pool.submit(held, leaves, Use.STEP, 9)
    until(lambda: len(grad_lock._waiting) > before)
    return future


@pytest.mark.parametrize("first", Use)
@pytest.mark.parametrize("second", Use)
def test_a_leaf_has_one_user(pool: ThreadPoolExecutor, first: Use, second: Use) -> None:
    one = held([A], first, 1)
    other = held([B], second, 2)
    other.close()
    if second is Use.RUN and first is not Use.STEP:
        with pytest.raises(RpcError, match="one backward pass at a time"):
            held([A], second, 2)
        one.close()
        return
    future = pool.submit(held, [A], second, 2)
    assert waits(future)
    one.close()
    future.result(SOON).close()


def test_a_step_that_waits_holds_nothing(pool: ThreadPoolExecutor) -> None:
    run = held([B], Use.RUN, 1)
    step = waiting_step(pool, [A, B])
    # The run reaches the other leaf.
    with GradLock([A], Use.HOOKS, 1):
        assert waits(step)
    run.close()
    step.result(SOON).close()


@pytest.mark.system
def test_hooks_that_begin_later_wait_behind_a_step(pool: ThreadPoolExecutor) -> None:
    hooks = held([A], Use.HOOKS, 1)
    step = waiting_step(pool, [A, B])
    later = pool.submit(held, [B], Use.HOOKS, 2)
    assert waits(later)
    narrow = waiting_step(pool, [B])
    hooks.close()
    had = step.result(SOON)
    assert waits(later)
    had.close()
    narrow.result(SOON).close()
    later.result(SOON).close()


def test_a_step_that_waits_for_a_run_keeps_no_hooks_waiting(pool: ThreadPoolExecutor) -> None:
    """The run ends when other workers have done their parts, which may need these hooks."""
    run = held([A], Use.RUN, 1)
    step = waiting_step(pool, [A, B])
    with GradLock([B], Use.HOOKS, 2):
        pass
    run.close()
    step.result(SOON).close()


@pytest.mark.system
@pytest.mark.parametrize("use", [Use.HOOKS, Use.RUN])
def test_a_step_of_the_same_context_shares_what_its_pass_uses(
    pool: ThreadPoolExecutor, use: Use
) -> None:
    with GradLock([A], use, 1):
        with GradLock([A, B], Use.STEP, 1) as step:
            assert [leaf is A for leaf in step.lent] == [True]
            later = pool.submit(held, [B], Use.HOOKS, 2)
            assert waits(later)
        later.result(SOON).close()
        other = pool.submit(held, [A], Use.STEP, 2)
        assert waits(other)  # the pass still uses it
    other.result(SOON).close()


def test_a_step_in_a_hook_waits_for_another_step_only(pool: ThreadPoolExecutor) -> None:
    with GradLock([A], Use.HOOKS, 1):
        other = held([B], Use.STEP, 2)
        future = pool.submit(held, [A, B], Use.STEP, 1)
        assert waits(future)
        other.close()
        future.result(SOON).close()
        with (
            GradLock([B], Use.HOOKS, 2),
            pytest.raises(RpcError, match="a backward pass of another context uses"),
        ):
            held([A, B], Use.STEP, 1)


def test_contexts_are_not_confused_if_there_is_none(pool: ThreadPoolExecutor) -> None:
    with GradLock([A], Use.HOOKS, 1):
        future = pool.submit(held, [A], Use.STEP, None)
        assert waits(future)
    future.result(SOON).close()


@pytest.mark.parametrize("context", [1, 2])
def test_a_pass_in_a_hook_shares_the_hooks_leaf_also_if_a_step_waits(
    pool: ThreadPoolExecutor, context: int
) -> None:
    one = held([A], Use.HOOKS, 1)
    step = waiting_step(pool, [A])
    nested = pool.submit(held, [A], Use.HOOKS, context)
    assert waits(nested)  # of another thread
    with GradLock([A], Use.HOOKS, context) as inner:
        assert inner.lent == ([A] if context == 1 else [])
    assert not step.done()
    one.close()
    step.result(SOON).close()
    nested.result(SOON).close()


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


@pytest.fixture
def other() -> torch.Tensor:
    """A parameter of the leaf's DDP module that this process does not use."""
    return torch.rand(2, requires_grad=True)


@pytest.fixture
def _reduced(monkeypatch: pytest.MonkeyPatch, leaf: torch.Tensor, other: torch.Tensor) -> None:
    monkeypatch.setattr(engine.ddp, "reduced_with", lambda leaves: [leaf, other])


def accumulator_of(leaf: torch.Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]


def run(state: ContextState, root: torch.Tensor) -> None:
    engine.run([root], state.start, False, state)


@pytest.mark.usefixtures("_reduced")
def test_two_runs_at_once_over_a_ddp_module_are_an_error(leaf: torch.Tensor) -> None:
    before = leaf.grad
    with (
        GradLock([leaf], Use.RUN, 1),
        pytest.raises(RpcError, match="one backward pass at a time"),
    ):
        run(ContextState(2), (leaf * 2).sum())
    assert leaf.grad is before
    state = ContextState(3)
    run(state, (leaf * 2).sum())
    torch.testing.assert_close(state.gradients, {leaf: torch.full((3,), 2.0)})


@pytest.mark.usefixtures("_reduced")
def test_a_run_keeps_what_a_reducer_writes_to_unused_parameters(
    leaf: torch.Tensor, other: torch.Tensor
) -> None:
    def reduce(_: Any) -> None:
        def end() -> None:
            other.grad = torch.ones(2)

        torch.autograd.Variable._execution_engine.queue_callback(end)

    leaf.register_post_accumulate_grad_hook(reduce)
    state = ContextState(1)
    run(state, (leaf * 2).sum())
    torch.testing.assert_close(state.gradients[other], torch.ones(2))
    assert other.grad is None


@pytest.mark.usefixtures("_reduced")
def test_a_gradient_in_a_bucket_that_the_reducer_overwrites(leaf: torch.Tensor) -> None:
    """DDP makes ``.grad`` a view of its bucket if it is asked to."""
    bucket = leaf.grad
    assert bucket is not None

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        bucket.copy_(parameter.grad)
        parameter.grad = bucket

    leaf.register_post_accumulate_grad_hook(reduce)
    state = ContextState(1)
    run(state, (leaf * 2).sum())
    torch.testing.assert_close(state.gradients[leaf], torch.full((3,), 2.0))
    torch.testing.assert_close(leaf.grad, torch.full((3,), 7.0))


@pytest.mark.parametrize("reduced", [True, False])
def test_a_run_that_fails_puts_the_gradient_back(
    request: pytest.FixtureRequest, leaf: torch.Tensor, reduced: bool
) -> None:
    if reduced:
        request.getfixturevalue("_reduced")
    before = leaf.grad

    def accumulated(_: torch.Tensor) -> None: ...

    leaf.register_post_accumulate_grad_hook(accumulated)
    failing = torch.rand(3, requires_grad=True)
    state = ContextState(1)
    with pytest.raises(ValueError, match="in a node"):
        run(state, (leaf * Failing.apply(failing)).sum())
    assert leaf.grad is before
    torch.testing.assert_close(before, torch.full((3,), 7.0))
    run(state, (leaf * 2).sum())
    assert leaf in state.gradients


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_removes_itself(leaf: torch.Tensor, register: str) -> None:
    calls = []

    def once(_: torch.Tensor) -> None:
        calls.append(1)
        handle.remove()

    add: Callable[..., Any] = getattr(leaf, register)
    handle = add(once)
    state = ContextState(1)
    for _ in range(2):
        run(state, (leaf * 2).sum())
    assert calls == [1]
    torch.testing.assert_close(state.gradients[leaf], torch.full((3,), 4.0))


@pytest.mark.parametrize("has_hook", [False, True])
def test_no_hooks_of_a_run_stay_on_a_node(leaf: torch.Tensor, has_hook: bool) -> None:
    if has_hook:
        leaf.register_post_accumulate_grad_hook(lambda _: None)
    node = accumulator_of(leaf)
    for fails in (False, True):
        root = (leaf * 2).sum()
        if fails:
            with pytest.raises(ValueError, match="in a node"):
                run(ContextState(1), Failing.apply(root))
        else:
            run(ContextState(1), root)
        for register in (node.register_prehook, node.register_hook):
            handle = register(lambda *_: None)
            assert len(handle.hooks_dict_ref()) == 1
            handle.remove()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="new in torch 2.10")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_a_leaf_with_hooks_may_have_gradients_of_another_dtype(dtype: torch.dtype | None) -> None:
    leaf = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    leaf.grad_dtype = dtype
    leaf.register_post_accumulate_grad_hook(lambda _: None)
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
            run(second, (leaf * 3).sum())
            seen.append(leaf.grad[0].item())

    at = leaf if register.startswith("post") else node
    handle = getattr(at, f"register_{register}")(again)
    thread = threading.Thread(target=run, args=(first, (leaf * 2).sum()), daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    handle.remove()
    assert leaf.grad is before
    assert seen == ([2.0, 5.0, 5.0] if same else [2.0, 3.0, 2.0])
    found = first.gradients[leaf] if same else first.gradients[leaf] + second.gradients[leaf]
    torch.testing.assert_close(found, torch.full((3,), 5.0))
