"""Optimizers that keep values of their own in ``param_groups``, as schedule-free ones do."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.remote_parameters import PARAMETERS, run_backward
from tests.optim.twins import STEPS, Twins
from zrpc.optim import DistributedOptimizer
from zrpc.optim.local import LocalOptimizer

pytestmark = [pytest.mark.zrpc(workers=3, timeout=60), pytest.mark.usefixtures("caller")]


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


RATES = pytest.mark.parametrize("rate", ["number", "list", "tensor"])


def test_groups_keep_what_the_optimizer_changes() -> None:
    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 0.2}, {"params": params[2:]}]

    Twins(Warming, [1, 2, 1], groups=groups, lr=0.3).run()


@RATES
def test_param_groups_show_what_the_optimizer_has_changed(rate: str) -> None:
    twins = Twins(Warming, [1, 2], lr=0.3, rate=rate)
    for step in range(STEPS):
        twins.step(step)
        distributed, local = twins.first_groups
        for key in ("k", "longest", "rate"):
            assert distributed[key] == local[key]


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_a_scheduler_beside_what_the_optimizer_changes() -> None:
    Twins(Warming, [1, 2], lr=0.3).run(halving)


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
    Twins(torch.optim.SGD, [1, 2], lr=torch.tensor(0.3)).run(halving)


@pytest.mark.system
@RATES
def test_the_state_has_what_the_optimizer_has_changed(rate: str, tmp_path: Path) -> None:
    twins = Twins(Warming, [1, 0, 2], lr=0.3, rate=rate)
    twins.run()
    twins.set(lr=0.2)
    state = twins.distributed.state_dict()
    assert state["param_groups"][0]["k"] == STEPS
    assert state["param_groups"][0]["lr"] == 0.2
    for of_worker in state["workers"].values():
        assert of_worker["param_groups"][0]["k"] == STEPS
    torch.save(state, tmp_path / "state.pt")
    twins.distributed = DistributedOptimizer(Warming, twins.rrefs, lr=9.0, rate=rate)
    twins.distributed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
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
    torch.save(twins.distributed.state_dict(), tmp_path / "state.pt")
    twins.distributed = DistributedOptimizer(Skipping, twins.rrefs, lr=0.3)
    twins.distributed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    step_over(0, 4)
    step_over(1, 5)


def step_at(optimizer: DistributedOptimizer, rref: Any, lr: float | None) -> None:
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        optimizer.step(context_id)


def test_trainers_have_options_of_their_own() -> None:
    """What one sets does not apply to the steps of another; what the optimizer counts does."""
    twins = Twins(Warming, [1], lr=1.0)
    optimizer, [rref] = twins.distributed, twins.rrefs
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
