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
from tests.optim.twins import STEPS, Twins, drawn, rows_of
from zrpc.optim import DistributedOptimizer

pytestmark = [pytest.mark.zrpc(workers=3, timeout=60), pytest.mark.usefixtures("caller")]

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
}


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LBFGS", "SparseAdam"}))
def test_each_class_steps_over_three_owners(name: str) -> None:
    """One owner is the worker with the optimizer."""
    Twins(CLASSES[name], [1, 0, 2, 1], **OPTIONS.get(name, {"lr": 0.1})).run()


@pytest.mark.parametrize("owner", [0, 1])
def test_lbfgs_steps_over_one_owner(owner: int) -> None:
    """It needs all its parameters together, and so one owner."""
    Twins(torch.optim.LBFGS, [owner, owner], lr=0.1, max_iter=1).run()


@pytest.mark.parametrize("options", [{}, {"max_iter": 1, "line_search_fn": "strong_wolfe"}])
def test_lbfgs_with_several_evaluations_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_iter=1"):
        Twins(torch.optim.LBFGS, [1], **options)


def test_sparse_adam_takes_sparse_gradients() -> None:
    Twins(torch.optim.SparseAdam, [1, 2], lr=0.1).run(fn=rows_of)


def test_the_class_gets_positional_arguments() -> None:
    Twins(torch.optim.SGD, [1, 2], 0.1, 0.9).run()


def test_groups_have_their_own_options() -> None:
    def groups(weights: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": weights[:2], "lr": 0.5},
            {"params": weights[2:3]},
            {"params": weights[3:], "weight_decay": 0.1, "momentum": 0.5},
        ]

    Twins(torch.optim.SGD, [1, 0, 2, 1, 2], groups=groups, lr=0.05).run()


def test_the_parameters_can_come_from_a_generator() -> None:
    Twins(torch.optim.SGD, [1, 2], groups=lambda weights: (w for w in weights), lr=0.1).run()


def test_a_parameter_without_gradient_does_not_change() -> None:
    twins = Twins(torch.optim.AdamW, [1, 1, 2], lr=0.1)
    for step in range(STEPS):
        twins.step(step, slice(1))
    assert torch.equal(PARAMETERS["w1"].detach(), drawn(1))
    assert torch.equal(PARAMETERS["w2"].detach(), drawn(2))


def test_zero_grad_clears_gradients_on_all_owners() -> None:
    distributed = Twins(torch.optim.SGD, [1, 2], lr=0.1).distributed
    for name in ("w0", "w1"):
        PARAMETERS[name].grad = torch.ones(4, 3, dtype=torch.float64)
    distributed.zero_grad(set_to_none=False)
    assert not PARAMETERS["w0"].grad.any()
    distributed.zero_grad()
    assert PARAMETERS["w0"].grad is PARAMETERS["w1"].grad is None


@pytest.mark.system
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_training_continues_from_a_saved_state(name: str, tmp_path: Path) -> None:
    options = OPTIONS.get(name, {"lr": 0.1})
    twins = Twins(CLASSES[name], [1, 0, 2], **options)
    twins.run()
    twins.set(lr=0.03)
    torch.save(twins.distributed.state_dict(), tmp_path / "state.pt")
    twins.distributed = DistributedOptimizer(CLASSES[name], twins.rrefs, **{**options, "lr": 9.0})
    twins.distributed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert twins.distributed.param_groups[0]["lr"] == 0.03
    twins.run()


def test_a_state_with_other_owners_or_groups_is_refused() -> None:
    twins = Twins(torch.optim.SGD, [1, 2], lr=0.1)
    rrefs, state = twins.rrefs, twins.distributed.state_dict()
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
def test_a_scheduler_sets_the_rates_of_all_owners(scheduler: str) -> None:
    Twins(torch.optim.SGD, [1, 0, 2], lr=0.2, momentum=0.9).run(SCHEDULERS[scheduler])


def test_one_cycle_sets_betas_too() -> None:
    Twins(torch.optim.Adam, [1, 2], lr=0.2).run(SCHEDULERS["OneCycleLR"])


def test_reduce_on_plateau_lowers_the_rate() -> None:
    twins = Twins(torch.optim.SGD, [1, 2], lr=0.2)
    scheduler = lr_scheduler.ReduceLROnPlateau(twins.distributed, factor=0.1, patience=0)
    for rate in (0.2, 0.2, 0.02):
        assert twins.distributed.param_groups[0]["lr"] == pytest.approx(rate)
        twins.set(lr=rate)
        twins.step(0)
        scheduler.step(1.0)


def test_a_scheduler_continues_after_a_restart() -> None:
    twins = Twins(torch.optim.SGD, [1, 2], lr=0.2)
    first, other = (SCHEDULERS["StepLR"](o) for o in (twins.distributed, twins.local))
    for step in range(3):
        twins.step(step)
        first.step()
        other.step()
    state = twins.distributed.state_dict()
    twins.distributed = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.2)
    second = SCHEDULERS["StepLR"](twins.distributed)
    second.load_state_dict(first.state_dict())
    # torch's schedulers set the rate again when they are made.
    twins.distributed.load_state_dict(state)
    for step in range(3):
        twins.step(step)
        second.step()
        other.step()
