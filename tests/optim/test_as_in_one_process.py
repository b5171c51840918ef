"""Optimizers and schedulers over parameters of several workers equal those of one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.twins import PARAMETERS, STEPS, Twins, drawn, rows_of, run_backward
from zrpc.optim import DistributedOptimizer
from zrpc.optim.local import LocalOptimizer

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


@pytest.mark.system
def test_lbfgs_steps_over_one_owner() -> None:
    """It needs all its parameters together, and so one owner."""
    for owner in (0, 1):
        Twins(torch.optim.LBFGS, [owner, owner], lr=0.1, max_iter=1).run()


def test_lbfgs_with_several_evaluations_is_refused() -> None:
    options: dict[str, Any]
    for options in ({}, {"max_iter": 1, "line_search_fn": "strong_wolfe"}):
        with pytest.raises(ValueError, match="max_iter=1"):
            Twins(torch.optim.LBFGS, [1], **options)


def test_sparse_adam_takes_sparse_gradients() -> None:
    Twins(torch.optim.SparseAdam, [1, 2], lr=0.1).run(fn=rows_of)


def test_the_class_gets_positional_arguments_and_parameters_of_a_generator() -> None:
    Twins(torch.optim.SGD, [1, 2], 0.1, 0.9, groups=lambda weights: (w for w in weights)).run()


def test_groups_have_their_own_options() -> None:
    def groups(weights: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": weights[:2], "lr": 0.5},
            {"params": weights[2:3]},
            {"params": weights[3:], "weight_decay": 0.1, "momentum": 0.5},
        ]

    Twins(torch.optim.SGD, [1, 0, 2, 1, 2], groups=groups, lr=0.05).run()


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


# Optimizers that keep values of their own in ``param_groups``, as schedule-free ones do.


class Warming(torch.optim.Optimizer):
    """Counts its steps in the group, and has a growing rate there, stored in one of these ways."""

    def __init__(self, params: Any, lr: float, rate: str = "number") -> None:
        first: Any = {"number": 0.1, "list": [0.1], "tensor": torch.tensor(0.1)}[rate]
        super().__init__(params, {"lr": lr, "k": 0, "rate": first})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            rate = group["rate"]
            if isinstance(rate, list):
                rate[0] *= 2
                rate = rate[0]
            elif isinstance(rate, torch.Tensor):
                rate *= 2
            else:
                rate = group["rate"] = rate * 2
            group["longest"] = max(group.get("longest", 0), group["k"])
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * float(rate) / group["k"] * p.grad


class Decaying(torch.optim.SGD):
    """Lowers the learning rate with each step."""

    def step(self) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.5


def test_groups_keep_what_the_optimizer_changes() -> None:
    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 0.2}, {"params": params[2:]}]

    Twins(Warming, [1, 2, 1], groups=groups, lr=0.3).run()


def test_a_scheduler_beside_what_the_optimizer_changes() -> None:
    Twins(Warming, [1, 2], lr=0.3).run(SCHEDULERS["StepLR"])


def test_an_option_that_both_change() -> None:
    """The optimizer goes on from what the trainer has set, once."""
    twins = Twins(Decaying, [1, 2], lr=0.3)
    for step in range(6):
        if step == 3:
            twins.set(lr=0.2)
        twins.step(step)
        distributed, local = twins.first_groups
        assert distributed["lr"] == local["lr"]


def test_a_rate_in_a_tensor_that_a_scheduler_changes_in_place() -> None:
    Twins(torch.optim.SGD, [1, 2], lr=torch.tensor(0.3)).run(SCHEDULERS["StepLR"])


SAVED = {
    **{name: OPTIONS.get(name, {"lr": 0.1}) for name in ("SGD", "Adam", "Adagrad", "RMSprop")},
    **{f"Warming, {rate}": {"lr": 0.3, "rate": rate} for rate in ("number", "list", "tensor")},
}


@pytest.mark.system
@pytest.mark.parametrize("name", SAVED)
def test_training_continues_from_a_saved_state(name: str, tmp_path: Path) -> None:
    """It has what the optimizer has changed in its groups."""
    options = SAVED[name]
    twins = Twins(CLASSES.get(name, Warming), [1, 0, 2], **options)
    twins.run()
    twins.set(lr=0.03)
    state = twins.save_and_load(tmp_path / "state.pt", **{**options, "lr": 9.0})
    for groups in (each["param_groups"] for each in (state, *state["workers"].values())):
        assert groups[0].get("k", STEPS) == STEPS
    assert state["param_groups"][0]["lr"] == twins.distributed.param_groups[0]["lr"] == 0.03
    twins.run()


def test_owners_keep_values_that_differ(tmp_path: Path) -> None:
    """Also through a saved state: each owner's optimizer has its own."""

    class Skipping(Warming):
        """Does nothing without a gradient."""

        def step(self) -> None:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                super().step()

    twins = Twins(Skipping, [1, 2], lr=0.3)
    locals_ = [Skipping([weight], lr=0.3) for weight in twins.weights]

    def step_over(which: int, step: int) -> None:
        twins.local = locals_[which]
        twins.step(step, slice(which, which + 1))

    for step in range(3):
        step_over(1, step)
    step_over(0, 3)
    twins.save_and_load(tmp_path / "state.pt", lr=0.3)
    step_over(0, 4)
    step_over(1, 5)


def step_at(optimizer: DistributedOptimizer, rref: Any, lr: float | None) -> None:
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        optimizer.step(context_id)
    assert optimizer.state_dict()["workers"].keys() == {"worker1"}


def test_trainers_have_options_of_their_own() -> None:
    """What one sets does not apply to the steps of another; what the optimizer counts does."""
    twins = Twins(Warming, [1], lr=1.0)
    optimizer, [rref] = twins.distributed, twins.rrefs
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps `step`
    before = PARAMETERS["w0"].detach().clone()
    zrpc.rpc_sync("worker2", step_at, (optimizer, rref, 0.5))
    step_at(optimizer, rref, None)
    expected = before - 0.5 * 0.2 / 1 - 1.0 * 0.4 / 2
    torch.testing.assert_close(PARAMETERS["w0"].detach(), expected)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1.0


def test_a_failed_step_leaves_no_options_behind() -> None:
    class Failing(torch.optim.SGD):
        def step(self) -> None:
            if self.param_groups[0]["lr"] == 7:
                raise ValueError("seven")
            super().step()

    twins = Twins(Failing, [1], lr=0.3)
    twins.set(lr=7)
    with pytest.raises(ValueError, match="seven"):
        twins.step(0)
    twins.set(lr=0.3)
    twins.step(0)


def test_a_state_does_not_change_with_later_steps() -> None:
    """While it is sent, another trainer may step."""
    rrefs = Twins(Warming, [0], lr=0.3).rrefs
    optimizer = LocalOptimizer(Warming, {0: {"params": rrefs}}, lr=0.3, rate="tensor")
    momentum = LocalOptimizer(torch.optim.SGD, {0: {"params": rrefs}}, lr=0.3, momentum=0.9)
    with dist_autograd.context() as context_id:
        run_backward(context_id, rrefs)
        for each in (optimizer, momentum):
            each.step(context_id, {0: {}})
        states = [each.state_dict() for each in (optimizer, momentum)]
        before = deepcopy(states)
        for each in (optimizer, momentum):
            each.step(context_id, {0: {}})
    torch.testing.assert_close(states, before)
