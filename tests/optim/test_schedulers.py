"""Learning-rate schedulers over parameters of several workers equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.optim.twins import (
    STEPS,
    assert_equal,
    distributed_step,
    groups_of,
    local_step,
    step_both,
    twins,
)
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.filterwarnings("error:.*lr_scheduler.step")
def test_a_scheduler_sets_the_rates_of_all_owners(caller: Mesh, scheduler: str) -> None:
    rrefs, weights = twins([1, 0, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.2, momentum=0.9)
    local = torch.optim.SGD(weights, lr=0.2, momentum=0.9)
    schedulers = [SCHEDULERS[scheduler](o) for o in (distributed, local)]
    for step in range(6):
        step_both(distributed, rrefs, local, weights, step)
        for each in schedulers:
            each.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


def test_one_cycle_sets_betas_too(caller: Mesh) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.2)
    local = torch.optim.Adam(weights, lr=0.2)
    schedulers = [SCHEDULERS["OneCycleLR"](o) for o in (distributed, local)]
    for step in range(6):
        step_both(distributed, rrefs, local, weights, step)
        for each in schedulers:
            each.step()


def test_reduce_on_plateau_lowers_the_rate(caller: Mesh) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.2)
    local = torch.optim.SGD(weights, lr=0.2)
    schedulers = [
        lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=0) for o in (distributed, local)
    ]
    for step in range(STEPS):
        step_both(distributed, rrefs, local, weights, step)
        for each in schedulers:
            each.step(1.0)
    assert distributed.param_groups[0]["lr"] == local.param_groups[0]["lr"] < 0.2


def test_a_scheduler_sets_the_rate_of_each_group(caller: Mesh) -> None:
    rrefs, weights = twins([1, 0, 2, 1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, groups_of(rrefs), lr=0.05)
    local = torch.optim.SGD(groups_of(weights), lr=0.05)
    schedulers = [SCHEDULERS["StepLR"](o) for o in (distributed, local)]
    for step in range(STEPS):
        step_both(distributed, rrefs, local, weights, step)
        for each in schedulers:
            each.step()


def test_a_scheduler_continues_after_a_restart(caller: Mesh) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.2)
    local = torch.optim.SGD(weights, lr=0.2)
    first, other = (SCHEDULERS["StepLR"](o) for o in (distributed, local))
    for step in range(3):
        distributed_step(distributed, rrefs, step)
        local_step(local, weights, step)
        first.step()
        other.step()
    restarted = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.2)
    restarted.load_state_dict(distributed.state_dict())
    second = SCHEDULERS["StepLR"](restarted)
    second.load_state_dict(first.state_dict())
    # torch's schedulers set the rate again when they are made.
    restarted.load_state_dict(distributed.state_dict())
    for step in range(3):
        distributed_step(restarted, rrefs, step)
        local_step(local, weights, step)
        assert_equal(weights)
        second.step()
        other.step()
