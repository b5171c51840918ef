"""Steps of an optimizer: their context, many at once, errors and hooks."""

from __future__ import annotations

from collections.abc import Callable, KeysView
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NoReturn

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.remote_parameters import PARAMETERS, Parameter, make, refer, run_backward
from tests.support.identity import event
from tests.support.waiting import until
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

WAIT_SECONDS = 20.0


# The context.


def test_step_takes_the_current_context(caller: Mesh) -> None:
    rref = make("w", 1)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        assert optimizer.step() is None
    assert PARAMETERS["w"].tolist() == [0.5, 1.5, 2.5]


def test_step_outside_a_context_raises(caller: Mesh) -> None:
    rref = make("w", 1)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 77"):
        optimizer.step(77)
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        optimizer.step(context_id)
    assert PARAMETERS["w"].tolist() == [1.0, 2.0, 3.0]


def test_another_thread_can_step(caller: Mesh) -> None:
    rref, untouched = make("w", 1), make("untouched", 2)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref, untouched], lr=0.5)
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])

        def step() -> None:
            with caller.agent(0).as_current():
                optimizer.step(context_id)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(step).result(WAIT_SECONDS)
    assert PARAMETERS["w"].tolist(), PARAMETERS["untouched"].tolist() == (
        [0.5, 1.5, 2.5],
        [1.0, 2.0, 3.0],
    )


def test_step_uses_the_gradients_of_its_context_only(caller: Mesh) -> None:
    rref = make("w", 1)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref], 100.0)
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        optimizer.step(context_id)
        optimizer.step(context_id)
    assert PARAMETERS["w"].tolist() == [0.0, 1.0, 2.0]


# Many at once.


class Checked(torch.optim.Optimizer):
    """Records whether two of its steps over a parameter run at the same time."""

    running: ClassVar[set[int]] = set()
    overlaps: ClassVar[list[int]] = []

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if id(p) in Checked.running:
                Checked.overlaps.append(id(p))
            Checked.running.add(id(p))
        zrpc.rpc_sync("worker0", max, (1, 2))  # gives others the time to step
        for p in self.param_groups[0]["params"]:
            Checked.running.discard(id(p))


@pytest.mark.system
@pytest.mark.parametrize("kind", ["one optimizer", "several", "overlapping"])
def test_steps_over_a_parameter_run_one_after_another(mesh: Mesh, kind: str) -> None:
    Checked.running.clear()
    Checked.overlaps.clear()
    a, b = mesh.run(0, make, "a", 2), mesh.run(0, make, "b", 2)

    def optimizer(number: int) -> DistributedOptimizer:
        return DistributedOptimizer(Checked, [[a, b], [b, a], [a]][number % 3])

    one = mesh.run(0, DistributedOptimizer, Checked, [a, b])

    def trainer(number: int) -> None:
        with mesh.agent(0).as_current():
            mine = {"one optimizer": lambda: one, "several": lambda: optimizer(0)}.get(
                kind, lambda: optimizer(number)
            )()
            for _ in range(3):
                with dist_autograd.context() as context_id:
                    run_backward(context_id, [a, b])
                    mine.step(context_id)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(trainer, range(6)))
    assert Checked.overlaps == []


class Gated(torch.optim.SGD):
    def step(self) -> None:
        event("entered").set()
        assert event("go").wait(WAIT_SECONDS)
        super().step()


def test_steps_over_other_parameters_do_not_wait_for_a_slow_step(mesh: Mesh) -> None:
    """While one step is blocked, steps over other parameters of the worker complete."""
    a, b = mesh.run(0, make, "a", 2), mesh.run(0, make, "b", 2)

    def slow() -> None:
        with mesh.agent(0).as_current():
            optimizer = DistributedOptimizer(Gated, [a], lr=1.0)
            with dist_autograd.context() as context_id:
                run_backward(context_id, [a])
                optimizer.step(context_id)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slow)
        assert event("entered").wait(WAIT_SECONDS)

        def run() -> None:
            optimizer = DistributedOptimizer(torch.optim.SGD, [b], lr=1.0)
            with dist_autograd.context() as context_id:
                run_backward(context_id, [b])
                optimizer.step(context_id)
                optimizer.state_dict()

        mesh.submit(0, run).result(WAIT_SECONDS / 2)
        assert PARAMETERS["b"].tolist() == [0.0, 1.0, 2.0]
        assert PARAMETERS["a"].tolist() == [1.0, 2.0, 3.0]
        event("go").set()
        future.result(WAIT_SECONDS)
    assert PARAMETERS["a"].tolist() == [0.0, 1.0, 2.0]


# Errors.


class Fails(torch.optim.SGD):
    def step(self) -> NoReturn:
        raise ArithmeticError("no step on purpose")


def fails_on_worker1(params: Any, lr: float) -> torch.optim.Optimizer:
    name = zrpc.get_worker_info().name
    return (Fails if name == "worker1" else torch.optim.SGD)(params, lr=lr)


def test_a_failed_step_of_one_owner_is_raised(caller: Mesh) -> None:
    """The caller gets the error, and the other owners have stepped."""
    rrefs = [make(f"w{rank}", rank) for rank in range(3)]
    optimizer = DistributedOptimizer(fails_on_worker1, rrefs, lr=1.0)
    with dist_autograd.context() as context_id:
        run_backward(context_id, rrefs)
        with pytest.raises(ArithmeticError, match="no step on purpose") as raised:
            optimizer.step(context_id)
        assert "worker1" in str(raised.value.__cause__)
    assert all(PARAMETERS[f"w{rank}"].grad is None for rank in range(3))
    again = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    with dist_autograd.context() as context_id:
        run_backward(context_id, rrefs)
        again.step(context_id)
    assert [PARAMETERS[f"w{rank}"].tolist() for rank in range(3)] == [
        [-1.0, 0.0, 1.0],
        [0.0, 1.0, 2.0],
        [-1.0, 0.0, 1.0],
    ]


def test_an_error_of_the_class_is_raised(caller: Mesh) -> None:
    rrefs = [make("a", 1), make("b", 2)]
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        DistributedOptimizer(torch.optim.SGD, rrefs, lr=-1.0)
    with pytest.raises(TypeError, match="no_such_option"):
        DistributedOptimizer(torch.optim.SGD, rrefs, no_such_option=1)


def test_wrong_arguments_are_refused(caller: Mesh) -> None:
    rref = make("a", 1)
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(torch.optim.SGD, [{"params": []}], lr=0.1)
    with pytest.raises(ValueError, match="more than once"):
        DistributedOptimizer(torch.optim.SGD, [rref, rref], lr=0.1)
    with pytest.raises(ValueError, match="more than once"):
        DistributedOptimizer(torch.optim.SGD, [{"params": [rref]}, {"params": [rref]}], lr=0.1)
    with pytest.raises(TypeError, match="RRefs of parameters"):
        DistributedOptimizer(torch.optim.SGD, [torch.ones(1)], lr=0.1)
    with pytest.raises(ValueError, match="in the constructor"):
        DistributedOptimizer(torch.optim.SGD, [rref], lr=0.1).add_param_group({"params": []})


def test_an_rref_of_another_value_is_refused(caller: Mesh) -> None:
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        DistributedOptimizer(torch.optim.SGD, [zrpc.remote("worker1", max, (1, 2))], lr=0.1)


def test_two_rrefs_of_one_parameter_are_refused(caller: Mesh) -> None:
    """Their ids differ: only the owner can tell."""
    first = make("a", 1)
    second = zrpc.rpc_sync("worker1", refer, ("a",))
    assert first != second
    other = make("b", 1)
    for groups in ([first, other, second], [{"params": [first]}, {"params": [other, second]}]):
        with pytest.raises(ValueError, match="more than once"):
            DistributedOptimizer(torch.optim.SGD, groups, lr=1)


@pytest.mark.system
def test_step_hooks_run_on_this_worker(caller: Mesh) -> None:
    rref = make("w", 1)
    seen: list[Any] = []
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
    other = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)

    def record(when: str) -> Callable[..., None]:
        return lambda *call: seen.append((when, call[0] is optimizer, call[1:]))

    before = optimizer.register_step_pre_hook(record("before"))
    optimizer.register_step_post_hook(record("after"))
    optimizer.register_step_post_hook(lambda *_: seen.append(PARAMETERS["w"].tolist()))
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        optimizer.step(context_id)
        before.remove()
        seen.append("again")
        optimizer.step(context_id)
        other.step(context_id)
    call = ((optimizer, context_id), {})
    assert seen[:3] == [("before", True, call), ("after", True, call), [0.5, 1.5, 2.5]]
    assert seen[3:] == ["again", ("after", True, call), [0.0, 1.0, 2.0]]


def test_state_hooks_run_on_this_worker(caller: Mesh) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [make("w", 1)], lr=0.5)
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "epoch": 7})
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append(state["epoch"]))
    state = optimizer.state_dict()
    assert state["epoch"] == 7

    def shift(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(state.pop("epoch"))
        return {**state, "param_groups": [{"lr": 0.25}]}

    optimizer.register_load_state_dict_pre_hook(shift)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert state["epoch"] == 7  # the caller's dict is not changed
    assert seen == ["save", 7, 7, "loaded"]


def step_here(optimizer: DistributedOptimizer, rref: Parameter) -> KeysView[str]:
    optimizer.param_groups[0]["lr"] = 0.25
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        optimizer.step(context_id)
    return optimizer.state_dict()["workers"].keys()


def test_it_can_be_passed_to_another_worker(caller: Mesh) -> None:
    rref, other = make("w", 1), make("other", 2)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref, other], lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps `step`
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        optimizer.step(context_id)
    owners = zrpc.rpc_sync("worker2", step_here, (optimizer, rref))
    assert owners == {"worker1", "worker2"}
    assert optimizer.param_groups[0]["lr"], PARAMETERS["w"].tolist() == (0.5, [0.25, 1.25, 2.25])


def test_the_repr_names_the_owners(caller: Mesh) -> None:
    rrefs = [make("a", 1), make("b", 2)]
    text = repr(DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1))
    assert "worker1" in text
    assert "worker2" in text


def make_parameter() -> Parameter:
    return zrpc.RRef(torch.ones(2, requires_grad=True))


@pytest.mark.zrpc(workers=3, processes=True, timeout=60)
def test_a_dead_owner_fails_the_step(mesh: Mesh) -> None:
    future = mesh.submit(0, optimize_two)
    future.result(WAIT_SECONDS)
    mesh.kill("worker2")
    with pytest.raises(ConnectionError, match="worker2"):
        mesh.submit(0, step_of_two).result(WAIT_SECONDS)


def optimize_two() -> None:
    agent = zrpc.agent.current.current_agent()
    rrefs = [zrpc.rpc_sync(f"worker{rank}", make_parameter) for rank in (1, 2)]
    agent.test_optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)


def step_of_two() -> None:
    agent = zrpc.agent.current.current_agent()
    optimizer = agent.__dict__.pop("test_optimizer")
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)


@pytest.mark.parametrize("dead", [1, 2])
def test_the_other_owner_steps_if_one_is_dead_already(mesh: Mesh, dead: int) -> None:
    """As if it died during the step; and the step waits for the other one."""
    living = 3 - dead
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        rrefs = [make(f"w{rank}", rank) for rank in (1, 2)]
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.5)
        run_backward(context_id, rrefs)
        mesh.agent(dead).close()
        until(lambda: dead in mesh.agent(0).membership.lost)
        with pytest.raises(zrpc.OwnerDied, match=f"worker{dead}"):
            optimizer.step(context_id)
        assert PARAMETERS[f"w{living}"].tolist() == [0.5, 1.5, 2.5]
