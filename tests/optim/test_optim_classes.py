"""Optimizers and schedulers over parameters of several workers equal those of one process."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.optim import lr_scheduler

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.optim import DistributedOptimizer

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

STEPS = 4

# The workers are threads of this process: each takes its parameters from here.
PARAMETERS: dict[str, torch.Tensor] = {}


@pytest.fixture(autouse=True)
def _forget():
    yield
    PARAMETERS.clear()


def drawn(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def parameter(name, number):
    PARAMETERS[name] = drawn(number).requires_grad_()
    return PARAMETERS[name]


def refer(name):
    return zrpc.RRef(PARAMETERS[name])


def make(name, owner, number):
    """A parameter at a worker, and the RRef of it that this worker has."""
    parameter(name, number)
    return zrpc.rpc_sync(f"worker{owner}", refer, (name,))


def use(rref, step):
    return loss_of(rref.local_value(), step)


def loss_of(weight, step):
    scale = torch.linspace(0.5, 2, 12, dtype=torch.float64).view(4, 3)
    return ((weight * scale * (step + 1)).sin() ** 2).sum()


def look_up(rref, step):
    return rows_of(rref.local_value(), step)


def rows_of(weight, step):
    rows = torch.nn.functional.embedding(torch.tensor([0, 2, step % 4]), weight, sparse=True)
    return (rows**2 * (step + 1)).sum()


def distributed_loss(rrefs, step, fn=use):
    futures = [zrpc.rpc_async(rref.owner(), fn, (rref, step)) for rref in rrefs]
    return sum(future.wait() for future in futures)


def distributed_step(optimizer, rrefs, step, fn=use, then=None):
    with dist_autograd.context() as context_id:
        loss = distributed_loss(rrefs, step, fn)
        dist_autograd.backward(context_id, [loss])
        if then is not None:
            then(context_id)
        optimizer.step(context_id)
        return loss.item()


def local_step(optimizer, weights, step, fn=loss_of, then=None):
    optimizer.zero_grad()
    loss = sum(fn(weight, step) for weight in weights)
    loss.backward()
    if then is not None:
        then(weights)
    optimizer.step(*([lambda: loss] if isinstance(optimizer, torch.optim.LBFGS) else []))
    return loss.item()


def twins(owners):
    """RRefs of parameters of these workers, and equal local parameters."""
    rrefs = [make(f"w{i}", owner, i) for i, owner in enumerate(owners)]
    return rrefs, [drawn(i).requires_grad_() for i in range(len(owners))]


def assert_equal(locals_):
    for i, weight in enumerate(locals_):
        torch.testing.assert_close(PARAMETERS[f"w{i}"].detach(), weight.detach())
        assert PARAMETERS[f"w{i}"].grad is None


def step_alike(distributed, rrefs, local, weights, step):
    """A step of both optimizers, after which the parameters are equal."""
    distributed_step(distributed, rrefs, step)
    local_step(local, weights, step)
    assert_equal(weights)


def compare(optimizer_class, owners, *args, fn=(use, loss_of), steps=STEPS, **kwargs):
    rrefs, weights = twins(owners)
    distributed = DistributedOptimizer(optimizer_class, rrefs, *args, **kwargs)
    local = optimizer_class(weights, *args, **kwargs)
    for step in range(steps):
        found = distributed_step(distributed, rrefs, step, fn[0])
        assert found == pytest.approx(local_step(local, weights, step, fn[1]))
        assert_equal(weights)
    assert not torch.equal(weights[0].detach(), drawn(0)), "nothing was learnt"


CLASSES = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}
OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "RMSprop": {"lr": 0.05, "momentum": 0.5, "centered": True},
    "Muon": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
    "LBFGS": {"lr": 0.1, "max_iter": 1},
}


def test_all_classes_are_here():
    assert {"SGD", "Adam", "AdamW", "LBFGS", "SparseAdam", "Rprop"} <= set(CLASSES)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LBFGS", "SparseAdam"}))
def test_each_class_over_three_owners(mesh, name):
    """This worker is one of them."""
    mesh.run(0, compare, CLASSES[name], [1, 0, 2, 1], **OPTIONS.get(name, {"lr": 0.1}))


@pytest.mark.parametrize("owner", [0, 1])
def test_lbfgs(mesh, owner):
    """It looks at all its parameters together, hence one owner."""
    mesh.run(0, compare, torch.optim.LBFGS, [owner, owner], lr=0.1, max_iter=1)


@pytest.mark.parametrize("options", [{}, {"max_iter": 1, "line_search_fn": "strong_wolfe"}])
def test_lbfgs_that_would_evaluate_again_is_refused(mesh, options):
    def run():
        rrefs, _ = twins([1])
        with pytest.raises(ValueError, match="max_iter=1"):
            DistributedOptimizer(torch.optim.LBFGS, rrefs, **options)

    mesh.run(0, run)


def test_sparse_adam(mesh):
    mesh.run(0, compare, torch.optim.SparseAdam, [1, 2], lr=0.1, fn=(look_up, rows_of))


def test_sgd_with_sparse_gradients(mesh):
    mesh.run(0, compare, torch.optim.SGD, [1, 2], lr=0.1, fn=(look_up, rows_of))


def test_positional_arguments(mesh):
    mesh.run(0, compare, torch.optim.SGD, [1, 2], 0.1, 0.9)


@pytest.mark.parametrize("foreach", [False, True])
def test_implementations(mesh, foreach):
    mesh.run(0, compare, torch.optim.AdamW, [1, 1, 2], lr=0.1, foreach=foreach)


def test_maximize(mesh):
    mesh.run(0, compare, torch.optim.SGD, [1], lr=0.1, maximize=True)


def test_an_optimizer_of_the_user(mesh):
    mesh.run(0, compare, Sign, [1, 2], step_size=0.1)


class Sign(torch.optim.Optimizer):
    def __init__(self, params, step_size):
        super().__init__(params, {"step_size": step_size})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["step_size"] * p.grad.sign()


def groups_of(weights):
    return [
        {"params": weights[:2], "lr": 0.5},
        {"params": weights[2:3]},
        {"params": weights[3:], "weight_decay": 0.1, "momentum": 0.5},
    ]


def test_groups(mesh):
    def run():
        rrefs, weights = twins([1, 0, 2, 1, 2])
        distributed = DistributedOptimizer(torch.optim.SGD, groups_of(rrefs), lr=0.05)
        local = torch.optim.SGD(groups_of(weights), lr=0.05)
        for step in range(STEPS):
            step_alike(distributed, rrefs, local, weights, step)
        for mine, theirs in zip(distributed.param_groups, local.param_groups, strict=True):
            assert {k: v for k, v in mine.items() if k != "params"} == {
                k: v for k, v in theirs.items() if k != "params"
            }

    mesh.run(0, run)


def test_options_that_are_set_in_the_groups(mesh):
    def run():
        rrefs, weights = twins([1, 2])
        distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.05)
        local = torch.optim.SGD(weights, lr=0.05)
        for step in range(STEPS):
            for optimizer in (distributed, local):
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                optimizer.param_groups[0]["momentum"] = 0.1 * step
            step_alike(distributed, rrefs, local, weights, step)

    mesh.run(0, run)


def test_a_generator_of_parameters(mesh):
    def run():
        rrefs, weights = twins([1, 2])
        distributed = DistributedOptimizer(torch.optim.SGD, (r for r in rrefs), lr=0.1)
        distributed_step(distributed, rrefs, 0)
        local_step(torch.optim.SGD(weights, lr=0.1), weights, 0)
        assert_equal(weights)

    mesh.run(0, run)


def test_a_parameter_without_gradient_is_left_as_it_is(mesh):
    def run():
        rrefs, weights = twins([1, 1, 2])
        distributed = DistributedOptimizer(torch.optim.AdamW, rrefs, lr=0.1)
        local = torch.optim.AdamW(weights, lr=0.1)
        for step in range(STEPS):
            distributed_step(distributed, rrefs[:1], step)
            local_step(local, weights[:1], step)
            assert_equal(weights)
        assert torch.equal(PARAMETERS["w1"].detach(), drawn(1))
        assert torch.equal(PARAMETERS["w2"].detach(), drawn(2))

    mesh.run(0, run)


def test_a_gradient_from_before_is_put_back(mesh):
    def run():
        rrefs, weights = twins([1])
        before = torch.ones(4, 3, dtype=torch.float64)
        PARAMETERS["w0"].grad = before
        distributed_step(DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1), rrefs, 0)
        assert PARAMETERS["w0"].grad is before
        assert torch.equal(before, torch.ones_like(before))
        PARAMETERS["w0"].grad = None
        local_step(torch.optim.SGD(weights, lr=0.1), weights, 0)
        assert_equal(weights)

    mesh.run(0, run)


def test_zero_grad(mesh):
    def run():
        rrefs, _ = twins([1, 2])
        distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
        for name in ("w0", "w1"):
            PARAMETERS[name].grad = torch.ones(4, 3, dtype=torch.float64)
        distributed.zero_grad(set_to_none=False)
        assert not PARAMETERS["w0"].grad.any()
        distributed.zero_grad()
        assert PARAMETERS["w0"].grad is PARAMETERS["w1"].grad is None

    mesh.run(0, run)


# state_dict


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop"])
def test_a_state_that_is_saved_and_loaded_goes_on_equal(mesh, name, tmp_path):
    options = OPTIONS.get(name, {"lr": 0.1})
    path = tmp_path / "state.pt"

    def run():
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

    mesh.run(0, run)


def test_a_state_is_a_copy(mesh):
    """Also that of parameters of this worker."""

    def run():
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

    mesh.run(0, run)


def test_a_state_of_others_is_refused(mesh):
    def run():
        rrefs, _ = twins([1, 2])
        state = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1).state_dict()
        with pytest.raises(ValueError, match=r"worker1.*worker2"):
            DistributedOptimizer(torch.optim.SGD, rrefs[:1], lr=0.1).load_state_dict(state)
        two_groups = [{"params": rrefs[:1]}, {"params": rrefs[1:]}]
        with pytest.raises(ValueError, match="2 groups"):
            DistributedOptimizer(torch.optim.SGD, two_groups, lr=0.1).load_state_dict(state)

    mesh.run(0, run)


# Schedulers

SCHEDULERS = {
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
def test_schedulers(mesh, scheduler):
    def run():
        rrefs, weights = twins([1, 0, 2])
        distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.2, momentum=0.9)
        local = torch.optim.SGD(weights, lr=0.2, momentum=0.9)
        schedulers = [SCHEDULERS[scheduler](o) for o in (distributed, local)]
        for step in range(6):
            step_alike(distributed, rrefs, local, weights, step)
            for each in schedulers:
                each.step()
            assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()

    mesh.run(0, run)


def test_one_cycle_with_betas(mesh):
    def run():
        rrefs, weights = twins([1, 2])
        distributed = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.2)
        local = torch.optim.Adam(weights, lr=0.2)
        schedulers = [SCHEDULERS["OneCycleLR"](o) for o in (distributed, local)]
        for step in range(6):
            step_alike(distributed, rrefs, local, weights, step)
            for each in schedulers:
                each.step()

    mesh.run(0, run)


def test_reduce_on_plateau(mesh):
    def run():
        rrefs, weights = twins([1, 2])
        distributed = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.2)
        local = torch.optim.SGD(weights, lr=0.2)
        schedulers = [
            lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=0) for o in (distributed, local)
        ]
        for step in range(STEPS):
            step_alike(distributed, rrefs, local, weights, step)
            for each in schedulers:
                each.step(1.0)
        assert distributed.param_groups[0]["lr"] == local.param_groups[0]["lr"] < 0.2

    mesh.run(0, run)


def test_a_scheduler_over_groups(mesh):
    def run():
        rrefs, weights = twins([1, 0, 2, 1, 2])
        distributed = DistributedOptimizer(torch.optim.SGD, groups_of(rrefs), lr=0.05)
        local = torch.optim.SGD(groups_of(weights), lr=0.05)
        schedulers = [SCHEDULERS["StepLR"](o) for o in (distributed, local)]
        for step in range(STEPS):
            step_alike(distributed, rrefs, local, weights, step)
            for each in schedulers:
                each.step()

    mesh.run(0, run)


def test_a_scheduler_that_goes_on_after_a_restart(mesh):
    def run():
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
        # torch's schedulers set the rate anew when they are made.
        restarted.load_state_dict(distributed.state_dict())
        for step in range(3):
            distributed_step(restarted, rrefs, step)
            local_step(local, weights, step)
            assert_equal(weights)
            second.step()
            other.step()

    mesh.run(0, run)
