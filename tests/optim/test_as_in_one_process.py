"""Optimizers and schedulers over parameters of several workers equal those of one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.optim.remote_parameters import PARAMETERS
from tests.optim.twins import (
    STEPS,
    assert_equal,
    compare,
    distributed_step,
    drawn,
    groups_of,
    local_step,
    look_up,
    rows_of,
    step_both,
    twins,
)
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


CLASSES: dict[str, Any] = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "RMSprop": {"lr": 0.05, "momentum": 0.5, "centered": True},
    "Muon": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
    "LBFGS": {"lr": 0.1, "max_iter": 1},
}


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LBFGS", "SparseAdam"}))
def test_each_class_steps_over_three_owners(mesh: Mesh, name: str) -> None:
    """One owner is the worker with the optimizer."""
    mesh.run(0, compare, CLASSES[name], [1, 0, 2, 1], **OPTIONS.get(name, {"lr": 0.1}))


@pytest.mark.system
@pytest.mark.parametrize("owner", [0, 1])
def test_lbfgs_steps_over_one_owner(mesh: Mesh, owner: int) -> None:
    """It needs all its parameters together, and so one owner."""
    mesh.run(0, compare, torch.optim.LBFGS, [owner, owner], lr=0.1, max_iter=1)


@pytest.mark.parametrize("options", [{}, {"max_iter": 1, "line_search_fn": "strong_wolfe"}])
def test_lbfgs_with_several_evaluations_is_refused(caller: Mesh, options: dict[str, Any]) -> None:
    rrefs, _ = twins([1])
    with pytest.raises(ValueError, match="max_iter=1"):
        DistributedOptimizer(torch.optim.LBFGS, rrefs, **options)


def test_sparse_adam_takes_sparse_gradients(mesh: Mesh) -> None:
    mesh.run(0, compare, torch.optim.SparseAdam, [1, 2], lr=0.1, fn=(look_up, rows_of))


def test_the_class_gets_positional_arguments(mesh: Mesh) -> None:
    mesh.run(0, compare, torch.optim.SGD, [1, 2], 0.1, 0.9)


def test_groups_have_their_own_options(caller: Mesh) -> None:
    rrefs, weights = twins([1, 0, 2, 1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, groups_of(rrefs), lr=0.05)
    local = torch.optim.SGD(groups_of(weights), lr=0.05)
    for step in range(STEPS):
        step_both(distributed, rrefs, local, weights, step)
    for mine, theirs in zip(distributed.param_groups, local.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


def test_the_parameters_can_come_from_a_generator(caller: Mesh) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, (r for r in rrefs), lr=0.1)
    distributed_step(distributed, rrefs, 0)
    local_step(torch.optim.SGD(weights, lr=0.1), weights, 0)
    assert_equal(weights)


def test_a_parameter_without_gradient_does_not_change(caller: Mesh) -> None:
    rrefs, weights = twins([1, 1, 2])
    distributed = DistributedOptimizer(torch.optim.AdamW, rrefs, lr=0.1)
    local = torch.optim.AdamW(weights, lr=0.1)
    for step in range(STEPS):
        distributed_step(distributed, rrefs[:1], step)
        local_step(local, weights[:1], step)
        assert_equal(weights)
    assert torch.equal(PARAMETERS["w1"].detach(), drawn(1))
    assert torch.equal(PARAMETERS["w2"].detach(), drawn(2))


def test_zero_grad_clears_gradients_on_all_owners(caller: Mesh) -> None:
    rrefs, _ = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    for name in ("w0", "w1"):
        PARAMETERS[name].grad = torch.ones(4, 3, dtype=torch.float64)
    distributed.zero_grad(set_to_none=False)
    assert not PARAMETERS["w0"].grad.any()
    distributed.zero_grad()
    assert PARAMETERS["w0"].grad is PARAMETERS["w1"].grad is None


@pytest.mark.system
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_training_continues_from_a_saved_state(caller: Mesh, name: str, tmp_path: Path) -> None:
    options = OPTIONS.get(name, {"lr": 0.1})
    path = tmp_path / "state.pt"

    rrefs, weights = twins([1, 0, 2])
    first = DistributedOptimizer(CLASSES[name], rrefs, **options)
    local = CLASSES[name](weights, **options)
    for step in range(STEPS):
        distributed_step(first, rrefs, step)
        local_step(local, weights, step)
    first.param_groups[0]["lr"] = local.param_groups[0]["lr"] = 0.03
    torch.save(first.state_dict(), path)
    second = DistributedOptimizer(CLASSES[name], rrefs, **{**options, "lr": 9.0})
    second.load_state_dict(torch.load(path, weights_only=True))
    assert second.param_groups[0]["lr"] == 0.03
    for step in range(STEPS):
        distributed_step(second, rrefs, step)
        local_step(local, weights, step)
        assert_equal(weights)


def test_a_state_with_other_owners_or_groups_is_refused(caller: Mesh) -> None:
    rrefs, _ = twins([1, 2])
    state = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"worker1.*worker2"):
        DistributedOptimizer(torch.optim.SGD, rrefs[:1], lr=0.1).load_state_dict(state)
    two_groups = [{"params": rrefs[:1]}, {"params": rrefs[1:]}]
    with pytest.raises(ValueError, match="2 groups"):
        DistributedOptimizer(torch.optim.SGD, two_groups, lr=0.1).load_state_dict(state)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8),
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
