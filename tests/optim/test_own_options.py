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
from tests.optim.twins import STEPS, distributed_step, local_step, step_both, twins
from zrpc.optim import DistributedOptimizer
from zrpc.optim.local import LocalOptimizer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


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


def test_groups_keep_what_the_optimizer_changes(caller: Mesh) -> None:
    def groups(params: list[Any]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 0.2}, {"params": params[2:]}]

    rrefs, weights = twins([1, 2, 1])
    distributed = DistributedOptimizer(Warming, groups(rrefs), lr=0.3)
    local = Warming(groups(weights), lr=0.3)
    for step in range(STEPS):
        step_both(distributed, rrefs, local, weights, step)


@RATES
def test_param_groups_show_what_the_optimizer_has_changed(caller: Mesh, rate: str) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(Warming, rrefs, lr=0.3, rate=rate)
    local = Warming(weights, lr=0.3, rate=rate)
    for step in range(STEPS):
        step_both(distributed, rrefs, local, weights, step)
        for key in ("k", "longest", "rate"):
            assert distributed.param_groups[0][key] == local.param_groups[0][key]


def test_a_scheduler_beside_what_the_optimizer_changes(caller: Mesh) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(Warming, rrefs, lr=0.3)
    local = Warming(weights, lr=0.3)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (distributed, local)
    ]
    for step in range(STEPS):
        step_both(distributed, rrefs, local, weights, step)
        for scheduler in schedulers:
            scheduler.step()


def test_an_option_that_both_change(caller: Mesh) -> None:
    """The optimizer goes on from what the trainer has set, once."""

    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(Decaying, rrefs, lr=0.3)
    local = Decaying(weights, lr=0.3)
    for step in range(6):
        if step == 3:
            distributed.param_groups[0]["lr"] = local.param_groups[0]["lr"] = 0.2
        step_both(distributed, rrefs, local, weights, step)
        assert distributed.param_groups[0]["lr"] == local.param_groups[0]["lr"]


def test_a_rate_in_a_tensor_that_a_scheduler_changes_in_place(caller: Mesh) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=torch.tensor(0.3))
    local = torch.optim.SGD(weights, lr=torch.tensor(0.3))
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (distributed, local)
    ]
    for step in range(STEPS):
        step_both(distributed, rrefs, local, weights, step)
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.system
@RATES
def test_the_state_has_what_the_optimizer_has_changed(
    caller: Mesh, rate: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.pt"

    rrefs, weights = twins([1, 0, 2])
    first = DistributedOptimizer(Warming, rrefs, lr=0.3, rate=rate)
    local = Warming(weights, lr=0.3, rate=rate)
    for step in range(STEPS):
        step_both(first, rrefs, local, weights, step)
    first.param_groups[0]["lr"] = local.param_groups[0]["lr"] = 0.2
    state = first.state_dict()
    assert state["param_groups"][0]["k"] == STEPS
    assert state["param_groups"][0]["lr"] == 0.2
    for of_worker in state["workers"].values():
        assert of_worker["param_groups"][0]["k"] == STEPS
    torch.save(state, path)
    second = DistributedOptimizer(Warming, rrefs, lr=9.0, rate=rate)
    second.load_state_dict(torch.load(path, weights_only=True))
    for step in range(STEPS):
        step_both(second, rrefs, local, weights, step)


def test_owners_keep_values_that_differ(caller: Mesh, tmp_path: Path) -> None:
    """Also through a saved state: each owner's optimizer has its own."""

    class Skipping(Warming):
        """Does nothing without a gradient."""

        def step(self) -> None:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                super().step()

    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(Skipping, rrefs, lr=0.3)
    locals_ = [Skipping([weight], lr=0.3) for weight in weights]

    def step_over(optimizer: Any, which: int, step: int) -> None:
        distributed_step(optimizer, [rrefs[which]], step)
        local_step(locals_[which], [weights[which]], step)
        torch.testing.assert_close(PARAMETERS[f"w{which}"].detach(), weights[which].detach())

    for step in range(3):
        step_over(distributed, 1, step)
    step_over(distributed, 0, 3)
    torch.save(distributed.state_dict(), tmp_path / "state.pt")
    again = DistributedOptimizer(Skipping, rrefs, lr=0.3)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    step_over(again, 0, 4)
    step_over(again, 1, 5)


def step_at(optimizer: DistributedOptimizer, rref: Any, lr: float | None) -> None:
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        optimizer.step(context_id)


def test_trainers_have_options_of_their_own(caller: Mesh) -> None:
    """What one sets does not apply to the steps of another; what the optimizer counts does."""

    rrefs, _ = twins([1])
    optimizer = DistributedOptimizer(Warming, rrefs, lr=1.0)
    before = PARAMETERS["w0"].detach().clone()
    zrpc.rpc_sync("worker2", step_at, (optimizer, rrefs[0], 0.5))
    step_at(optimizer, rrefs[0], None)
    expected = before - 0.5 * 0.2 / 1 - 1.0 * 0.4 / 2
    torch.testing.assert_close(PARAMETERS["w0"].detach(), expected)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1.0


def test_a_failed_step_leaves_no_options_behind(caller: Mesh) -> None:
    class Failing(torch.optim.SGD):
        def step(self) -> None:
            if self.param_groups[0]["lr"] == 7:
                raise ValueError("seven")
            super().step()

    rrefs, weights = twins([1])
    optimizer = DistributedOptimizer(Failing, rrefs, lr=0.3)
    optimizer.param_groups[0]["lr"] = 7
    with pytest.raises(ValueError, match="seven"):
        distributed_step(optimizer, rrefs, 0)
    optimizer.param_groups[0]["lr"] = 0.3
    step_both(optimizer, rrefs, torch.optim.SGD(weights, lr=0.3), weights, 0)


def test_a_state_does_not_change_with_later_steps(caller: Mesh) -> None:
    """While it is sent, another trainer may step."""

    rrefs, _ = twins([0])
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
