"""Optimizers over parameters of several workers equal those of one process."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_the_classes_include_the_usual_ones() -> None:
    assert {"SGD", "Adam", "AdamW", "LBFGS", "SparseAdam", "Rprop"} <= set(CLASSES)


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


def test_sgd_takes_sparse_gradients(mesh: Mesh) -> None:
    mesh.run(0, compare, torch.optim.SGD, [1, 2], lr=0.1, fn=(look_up, rows_of))


def test_the_class_gets_positional_arguments(mesh: Mesh) -> None:
    mesh.run(0, compare, torch.optim.SGD, [1, 2], 0.1, 0.9)


@pytest.mark.parametrize("foreach", [False, True])
def test_both_implementations_step_both(mesh: Mesh, foreach: bool) -> None:
    mesh.run(0, compare, torch.optim.AdamW, [1, 1, 2], lr=0.1, foreach=foreach)


def test_maximize_climbs(mesh: Mesh) -> None:
    mesh.run(0, compare, torch.optim.SGD, [1], lr=0.1, maximize=True)


def test_an_optimizer_class_can_be_the_users_own(mesh: Mesh) -> None:
    mesh.run(0, compare, Sign, [1, 2], step_size=0.1)


class Sign(torch.optim.Optimizer):
    def __init__(self, params: Any, step_size: float) -> None:
        super().__init__(params, {"step_size": step_size})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["step_size"] * p.grad.sign()


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


def test_options_set_in_the_groups_take_effect(caller: Mesh) -> None:
    rrefs, weights = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.05)
    local = torch.optim.SGD(weights, lr=0.05)
    for step in range(STEPS):
        for optimizer in (distributed, local):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.param_groups[0]["momentum"] = 0.1 * step
        step_both(distributed, rrefs, local, weights, step)


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


def test_an_earlier_gradient_is_restored(caller: Mesh) -> None:
    rrefs, weights = twins([1])
    before = torch.ones(4, 3, dtype=torch.float64)
    PARAMETERS["w0"].grad = before
    distributed_step(DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1), rrefs, 0)
    assert PARAMETERS["w0"].grad is before
    assert torch.equal(before, torch.ones_like(before))
    PARAMETERS["w0"].grad = None
    local_step(torch.optim.SGD(weights, lr=0.1), weights, 0)
    assert_equal(weights)


def test_zero_grad_clears_gradients_on_all_owners(caller: Mesh) -> None:
    rrefs, _ = twins([1, 2])
    distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    for name in ("w0", "w1"):
        PARAMETERS[name].grad = torch.ones(4, 3, dtype=torch.float64)
    distributed.zero_grad(set_to_none=False)
    assert not PARAMETERS["w0"].grad.any()
    distributed.zero_grad()
    assert PARAMETERS["w0"].grad is PARAMETERS["w1"].grad is None


# The state.


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


def test_state_dict_returns_a_copy(caller: Mesh) -> None:
    """Even for parameters of this worker."""

    rrefs, _ = twins([0, 1])
    optimizer = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.1)
    distributed_step(optimizer, rrefs, 0)
    state = optimizer.state_dict()
    assert set(state) == {"workers", "param_groups"}
    assert set(state["workers"]) == {"worker0", "worker1"}
    before = {name: at["state"][0]["exp_avg"].clone() for name, at in state["workers"].items()}
    distributed_step(optimizer, rrefs, 1)
    for name, at in state["workers"].items():
        assert torch.equal(at["state"][0]["exp_avg"], before[name])


def test_a_state_with_other_owners_or_groups_is_refused(caller: Mesh) -> None:
    rrefs, _ = twins([1, 2])
    state = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"worker1.*worker2"):
        DistributedOptimizer(torch.optim.SGD, rrefs[:1], lr=0.1).load_state_dict(state)
    two_groups = [{"params": rrefs[:1]}, {"params": rrefs[1:]}]
    with pytest.raises(ValueError, match="2 groups"):
        DistributedOptimizer(torch.optim.SGD, two_groups, lr=0.1).load_state_dict(state)
