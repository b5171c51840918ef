"""Parameters on several workers, each with an equal one in this process, and steps over both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.remote_parameters import PARAMETERS, Parameter, refer
from zrpc.optim import DistributedOptimizer

STEPS = 4


def drawn(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def make(name: str, owner: int, number: int) -> Parameter:
    """Makes a random parameter on a worker, and returns an RRef of it."""
    PARAMETERS[name] = drawn(number).requires_grad_()
    return zrpc.rpc_sync(f"worker{owner}", refer, (name,))


def use(rref: Parameter, step: int) -> torch.Tensor:
    return loss_of(rref.local_value(), step)


def loss_of(weight: torch.Tensor, step: int) -> torch.Tensor:
    scale = torch.linspace(0.5, 2, 12, dtype=torch.float64).view(4, 3)
    return ((weight * scale * (step + 1)).sin() ** 2).sum()


def look_up(rref: Parameter, step: int) -> torch.Tensor:
    return rows_of(rref.local_value(), step)


def rows_of(weight: torch.Tensor, step: int) -> torch.Tensor:
    rows = torch.nn.functional.embedding(torch.tensor([0, 2, step % 4]), weight, sparse=True)
    return (rows**2 * (step + 1)).sum()


def distributed_loss(
    rrefs: list[Parameter], step: int, fn: Callable[..., torch.Tensor] = use
) -> Any:
    futures = [zrpc.rpc_async(rref.owner(), fn, (rref, step)) for rref in rrefs]
    return sum(future.wait() for future in futures)


def distributed_step(
    optimizer: DistributedOptimizer,
    rrefs: list[Parameter],
    step: int,
    fn: Callable[..., torch.Tensor] = use,
) -> float:
    with dist_autograd.context() as context_id:
        loss = distributed_loss(rrefs, step, fn)
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
        return loss.item()


def local_step(
    optimizer: torch.optim.Optimizer,
    weights: list[torch.Tensor],
    step: int,
    fn: Callable[..., torch.Tensor] = loss_of,
) -> float:
    optimizer.zero_grad()
    loss: Any = sum(fn(weight, step) for weight in weights)
    loss.backward()
    optimizer.step(*([lambda: loss] if isinstance(optimizer, torch.optim.LBFGS) else []))
    return loss.item()


def twins(owners: list[int]) -> tuple[list[Parameter], list[torch.Tensor]]:
    """Returns RRefs of parameters of these workers, and equal local parameters."""
    rrefs = [make(f"w{i}", owner, i) for i, owner in enumerate(owners)]
    return rrefs, [drawn(i).requires_grad_() for i in range(len(owners))]


def assert_equal(weights: list[torch.Tensor]) -> None:
    for i, weight in enumerate(weights):
        torch.testing.assert_close(PARAMETERS[f"w{i}"].detach(), weight.detach())
        assert PARAMETERS[f"w{i}"].grad is None


def step_both(
    distributed: DistributedOptimizer,
    rrefs: list[Parameter],
    local: torch.optim.Optimizer,
    weights: list[torch.Tensor],
    step: int,
) -> None:
    """Steps with both optimizers, and checks that the parameters are equal then."""
    distributed_step(distributed, rrefs, step)
    local_step(local, weights, step)
    assert_equal(weights)


def compare(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    owners: list[int],
    *args: Any,
    fn: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = (use, loss_of),
    **kwargs: Any,
) -> None:
    """Checks that a class steps alike over several workers and in one process."""
    rrefs, weights = twins(owners)
    distributed = DistributedOptimizer(optimizer_class, rrefs, *args, **kwargs)
    local = optimizer_class(weights, *args, **kwargs)
    for step in range(STEPS):
        found = distributed_step(distributed, rrefs, step, fn[0])
        assert found == pytest.approx(local_step(local, weights, step, fn[1]))
        assert_equal(weights)
    assert not torch.equal(weights[0].detach(), drawn(0)), "expected the parameters to change"


def groups_of(weights: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": weights[:2], "lr": 0.5},
        {"params": weights[2:3]},
        {"params": weights[3:], "weight_decay": 0.1, "momentum": 0.5},
    ]
