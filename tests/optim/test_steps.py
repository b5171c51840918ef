"""Steps of an optimizer: their context, many at once, errors, hooks, and passes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.twins import (
    PARAMETERS,
    Parameter,
    gradients,
    make,
    refer,
    run_backward,
    use,
)
from tests.support.identity import event
from tests.support.waiting import SOON, pending, until
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

SGD = torch.optim.SGD


def step_over(optimizer: DistributedOptimizer, *rrefs: Parameter, factor: float = 1.0) -> None:
    """Steps with gradients of ``factor``."""
    with dist_autograd.context() as context_id:
        run_backward(context_id, list(rrefs), factor)
        optimizer.step(context_id)


# The context.


def test_a_step_uses_the_gradients_of_its_context_only(caller: Mesh) -> None:
    """Of this thread's, if none is given."""
    rref, untouched = make("w", 1), make("untouched", 2)
    optimizer = DistributedOptimizer(SGD, [rref, untouched], lr=0.5)
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref], 100.0)
    with dist_autograd.context() as context_id:
        run_backward(context_id, [rref])
        assert optimizer.step() is None

        def step() -> None:
            with caller.agent(0).as_current():
                optimizer.step(context_id)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(step).result(SOON)
    assert PARAMETERS["w"].tolist() == [0.0, 1.0, 2.0]
    assert PARAMETERS["untouched"].tolist() == [1.0, 2.0, 3.0]


def test_a_step_outside_a_context_raises(caller: Mesh) -> None:
    rref = make("w", 1)
    optimizer = DistributedOptimizer(SGD, [rref], lr=0.5)
    with dist_autograd.context() as ended:
        run_backward(ended, [rref])
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        optimizer.step()
    for context_id in (77, ended):
        with pytest.raises(RuntimeError, match=f"Could not find autograd.* id: {context_id}"):
            optimizer.step(context_id)
    assert PARAMETERS["w"].tolist() == [1.0, 2.0, 3.0]


# Many at once.


class Gated(SGD):
    """Its step waits while ``.grad`` is the gradient of the step's context."""

    def step(self) -> None:
        event("in the step").set()
        assert event("let the step end").wait(SOON)
        super().step()


def test_steps_over_other_parameters_do_not_wait_for_a_slow_step(mesh: Mesh) -> None:
    """While one step is blocked, those of the same worker complete; its own state can't be read."""
    a, b = mesh.run(0, make, "a", 2), mesh.run(0, make, "b", 2)
    blocked = mesh.run(0, DistributedOptimizer, Gated, [a], lr=1.0)

    def slow() -> None:
        with mesh.agent(0).as_current():
            step_over(blocked, a)

    def run() -> None:
        optimizer = DistributedOptimizer(SGD, [b], lr=1.0)
        step_over(optimizer, b)
        optimizer.state_dict()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slow)
        assert event("in the step").wait(SOON)
        mesh.submit(0, run).result(SOON / 2)
        assert PARAMETERS["b"].tolist() == [0.0, 1.0, 2.0]
        assert PARAMETERS["a"].tolist() == [1.0, 2.0, 3.0]
        saved = mesh.submit(0, blocked.state_dict)
        assert pending(saved, 0.1)  # it would be the state of half a step
        event("let the step end").set()
        future.result(SOON)
        assert saved.result(SOON)["param_groups"]
    assert PARAMETERS["a"].tolist() == [0.0, 1.0, 2.0]


# Errors.


class Fails(SGD):
    def step(self) -> NoReturn:
        raise ArithmeticError("no step on purpose")


def fails_on_worker1(params: Any, lr: float) -> torch.optim.Optimizer:
    return (Fails if zrpc.get_worker_info().name == "worker1" else SGD)(params, lr=lr)


def test_a_failed_step_of_one_owner_is_raised(caller: Mesh) -> None:
    """The caller gets the error, and the other owners have stepped."""
    rrefs = [make(f"w{rank}", rank) for rank in range(3)]
    optimizer = DistributedOptimizer(fails_on_worker1, rrefs, lr=1.0)
    with pytest.raises(ArithmeticError, match="no step on purpose") as raised:
        step_over(optimizer, *rrefs)
    assert "worker1" in str(raised.value.__cause__)
    assert all(PARAMETERS[f"w{rank}"].grad is None for rank in range(3))
    step_over(DistributedOptimizer(SGD, rrefs, lr=1.0), *rrefs)
    found = [PARAMETERS[f"w{rank}"].tolist() for rank in range(3)]
    assert found == [[-1.0, 0.0, 1.0], [0.0, 1.0, 2.0], [-1.0, 0.0, 1.0]]


@pytest.mark.parametrize("dead", [1, 2])
def test_the_other_owner_steps_if_one_is_dead_already(mesh: Mesh, dead: int) -> None:
    """As if it died during the step; and the step waits for the other one."""
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        rrefs = [make(f"w{rank}", rank) for rank in (1, 2)]
        optimizer = DistributedOptimizer(SGD, rrefs, lr=0.5)
        run_backward(context_id, rrefs)
        mesh.agent(dead).close()
        until(lambda: dead in mesh.agent(0).membership.lost)
        with pytest.raises(zrpc.OwnerDied, match=f"worker{dead}"):
            optimizer.step(context_id)
        assert PARAMETERS[f"w{3 - dead}"].tolist() == [0.5, 1.5, 2.5]


def test_wrong_arguments_are_refused(caller: Mesh) -> None:
    rref, other = make("a", 1), make("b", 2)
    same = zrpc.rpc_sync("worker1", refer, ("a",))  # only the owner can tell
    assert same != rref
    twice = "more than once.* List it once: tied weights are one parameter"
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([], {}, ValueError, "empty parameter list"),
        ([{"params": []}], {}, ValueError, "empty parameter list"),
        ([rref, rref], {}, ValueError, twice),
        ([{"params": [rref]}, {"params": [rref]}], {}, ValueError, twice),
        ([rref, other, same], {}, ValueError, twice),
        ([{"params": [rref]}, {"params": [other, same]}], {}, ValueError, twice),
        ([torch.ones(1)], {}, TypeError, "RRefs of parameters"),
        ([zrpc.remote("worker1", max, (1, 2))], {}, TypeError, "can only optimize Tensors"),
        ([rref, other], {"lr": -1.0}, ValueError, "Invalid learning rate: -1"),
        ([rref, other], {"no_such_option": 1}, TypeError, "no_such_option"),
    ]
    for params, options, error, text in cases:
        with pytest.raises(error, match=text):
            DistributedOptimizer(SGD, params, **options)
    optimizer = DistributedOptimizer(SGD, [rref, other], lr=0.1)
    assert repr(optimizer) == "DistributedOptimizer(1 groups, on worker1, worker2)"
    with pytest.raises(ValueError, match="in the constructor"):
        optimizer.add_param_group({"params": []})


# Hooks of optimizers.


@pytest.mark.system
def test_step_hooks_run_on_this_worker(caller: Mesh) -> None:
    rref = make("w", 1)
    seen: list[Any] = []
    optimizer = DistributedOptimizer(SGD, [rref], lr=0.5)
    other = DistributedOptimizer(SGD, [rref], lr=0.5)

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
    optimizer = DistributedOptimizer(SGD, [make("w", 1)], lr=0.5)
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


# Passes of other contexts use the same ``.grad``, because of hooks on the parameters.


def parameter(mesh: Mesh, name: str = "w") -> Parameter:
    """A parameter of worker1, 0, whose ``.grad`` is 7, a gradient of ordinary training."""
    rref: Parameter = mesh.run(0, make, name, 1, (0.0,))
    PARAMETERS[name].grad = torch.full((1,), 7.0, dtype=torch.float64)
    return rref


def state_of(name: str = "w") -> tuple[float, float]:
    """A parameter's value and its ``.grad``."""
    found = PARAMETERS[name]
    assert found.grad is not None
    return found.item(), found.grad.item()


def on_accumulated(hook: Callable[[Any], None], name: str = "w") -> None:
    PARAMETERS[name].register_post_accumulate_grad_hook(hook)


def test_a_hook_that_steps(mesh: Mesh) -> None:
    """The step uses the gradient that has just been accumulated; the hook may then clear it."""
    w = parameter(mesh)

    def run() -> Any:
        optimizer = DistributedOptimizer(SGD, [w], lr=1.0)
        with dist_autograd.context() as context_id:

            def step(_: torch.Tensor) -> None:
                with mesh.agent(0).as_current():
                    optimizer.step(context_id)
                    optimizer.zero_grad()

            on_accumulated(step)
            for _ in range(2):
                dist_autograd.backward(context_id, [zrpc.rpc_sync("worker1", use, (w, 3.0))])
            return gradients(w, context_id)

    assert mesh.submit(0, run).result(SOON) is None
    assert state_of() == (-6.0, 7.0)


@pytest.mark.system
def test_trainers_without_locks_over_parameters_with_hooks(caller: Mesh) -> None:
    """Hogwild: each step uses the gradients of its own context, and none is lost.

    Some trainers share an optimizer; another one has the same parameters in another order.
    """
    trainers, rounds = 4, 10
    names = ("a", "b")
    rrefs = [parameter(caller, name) for name in names]
    optimizers = [DistributedOptimizer(SGD, order, lr=1.0) for order in (rrefs, rrefs[::-1])]
    hooked: list[float] = []
    for name in names:
        on_accumulated(lambda p: hooked.append(p.grad.item()), name)

    def train(number: int) -> None:
        with caller.agent(0).as_current():
            for _ in range(rounds):
                step_over(optimizers[number % 2], *rrefs, factor=number + 1.0)

    with ThreadPoolExecutor(trainers) as pool:
        list(pool.map(train, range(trainers)))
    total = rounds * sum(range(1, trainers + 1))
    assert [state_of(name) for name in names] == [(-total, 7.0)] * 2
    assert sorted(hooked) == sorted([n + 1.0 for n in range(trainers)] * rounds * len(names))
