"""Who may use ``.grad`` of which leaves at the same time, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.support.waiting import SOON, pending, until
from zrpc.errors import RpcError
from zrpc.services.autograd import grad_lock
from zrpc.services.autograd.grad_lock import GradLock, Use

A, B = torch.zeros(1), torch.zeros(1)
# How long the tests watch that something does not happen.
NOT_YET = 0.1


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
    assert not grad_lock._held
    assert not grad_lock._waiting


def held(leaves: list[torch.Tensor], use: Use, context_id: int | None) -> GradLock:
    lock = GradLock(leaves, use, context_id)
    lock.acquire()
    return lock


def waits(future: Future[GradLock]) -> bool:
    return pending(future, NOT_YET)


def waiting_step(pool: ThreadPoolExecutor, leaves: list[torch.Tensor]) -> Future[GradLock]:
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
    other.release()
    if second is Use.RUN and first is not Use.STEP:
        with pytest.raises(RpcError, match="one backward pass at a time"):
            GradLock([A], second, 2).acquire()
        one.release()
        return
    future = pool.submit(held, [A], second, 2)
    assert waits(future)
    one.release()
    future.result(SOON).release()


def test_a_step_that_waits_holds_nothing(pool: ThreadPoolExecutor) -> None:
    run = held([B], Use.RUN, 1)
    step = waiting_step(pool, [A, B])
    # The run reaches the other leaf.
    with GradLock([A], Use.HOOKS, 1):
        assert waits(step)
    run.release()
    step.result(SOON).release()


@pytest.mark.system
def test_hooks_that_begin_later_wait_behind_a_step(pool: ThreadPoolExecutor) -> None:
    hooks = held([A], Use.HOOKS, 1)
    step = waiting_step(pool, [A, B])
    later = pool.submit(held, [B], Use.HOOKS, 2)
    assert waits(later)
    narrow = waiting_step(pool, [B])
    hooks.release()
    had = step.result(SOON)
    assert waits(later)
    had.release()
    narrow.result(SOON).release()
    later.result(SOON).release()


def test_a_step_that_waits_for_a_run_keeps_no_hooks_waiting(pool: ThreadPoolExecutor) -> None:
    """The run ends when other workers have done their parts, which may need these hooks."""
    run = held([A], Use.RUN, 1)
    step = waiting_step(pool, [A, B])
    with GradLock([B], Use.HOOKS, 2):
        pass
    run.release()
    step.result(SOON).release()


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
        later.result(SOON).release()
        other = pool.submit(held, [A], Use.STEP, 2)
        assert waits(other)  # the pass still uses it
    other.result(SOON).release()


def test_a_step_in_a_hook_waits_for_another_step_only(pool: ThreadPoolExecutor) -> None:
    with GradLock([A], Use.HOOKS, 1):
        other = held([B], Use.STEP, 2)
        future = pool.submit(held, [A, B], Use.STEP, 1)
        assert waits(future)
        other.release()
        future.result(SOON).release()
        with (
            GradLock([B], Use.HOOKS, 2),
            pytest.raises(RpcError, match="a backward pass of another context uses"),
        ):
            GradLock([A, B], Use.STEP, 1).acquire()


def test_contexts_are_not_confused_if_there_is_none(pool: ThreadPoolExecutor) -> None:
    with GradLock([A], Use.HOOKS, 1):
        future = pool.submit(held, [A], Use.STEP, None)
        assert waits(future)
    future.result(SOON).release()


@pytest.mark.parametrize("context", [1, 2])
def test_a_pass_in_a_hook_shares_the_hooks_leaf_also_if_a_step_waits(
    pool: ThreadPoolExecutor, context: int
) -> None:
    one = held([A], Use.HOOKS, 1)
    step = waiting_step(pool, [A])
    nested = pool.submit(held, [A], Use.HOOKS, context)
    assert waits(nested)  # of another thread
    inner = held([A], Use.HOOKS, context)
    assert inner.lent == ([A] if context == 1 else [])
    inner.release()
    assert not step.done()
    one.release()
    step.result(SOON).release()
    nested.result(SOON).release()
