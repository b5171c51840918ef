"""Who may use ``.grad`` of which leaves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

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
    held([A, B], Use.RUN, None).close()  # which would be an error if either had a user


def held(leaves: list[torch.Tensor], use: Use, context_id: int | None) -> ExitStack:
    lock = ExitStack()
    lock.enter_context(GradLock(leaves, use, context_id))
    return lock


def waits(future: Future[ExitStack]) -> bool:
    return pending(future, NOT_YET)


def waiting_step(pool: ThreadPoolExecutor, leaves: list[torch.Tensor]) -> Future[ExitStack]:
    """A step of context 9 that waits."""
    before = len(grad_lock.waiting)
    future = pool.submit(held, leaves, Use.STEP, 9)
    until(lambda: len(grad_lock.waiting) > before)
    return future


@pytest.mark.parametrize("first", Use)
@pytest.mark.parametrize("second", Use)
def test_a_leaf_has_one_user(pool: ThreadPoolExecutor, first: Use, second: Use) -> None:
    one = held([A], first, 1)
    held([B], second, 2).close()
    if second is Use.RUN and first is not Use.STEP:
        with pytest.raises(RpcError, match="one backward pass at a time"):
            held([A], second, 2)
        one.close()
        return
    future = pool.submit(held, [A], second, 2)
    assert waits(future)
    one.close()
    future.result(SOON).close()


def test_a_step_that_waits_for_a_run_keeps_no_hooks_waiting(pool: ThreadPoolExecutor) -> None:
    """The run reaches another leaf; or it ends when other workers have done their parts."""
    run = held([B], Use.RUN, 1)
    step = waiting_step(pool, [A, B])
    for context_id in (1, 2):
        with GradLock([A], Use.HOOKS, context_id):
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
        others = [pool.submit(held, [A], Use.STEP, context_id) for context_id in (2, None)]
        assert all(map(waits, others))  # the pass still uses it
    others[0].result(SOON).close()
    others[1].result(SOON).close()


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
