"""Steps of an optimizer while backward passes of other contexts use the same ``.grad``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.remote_parameters import (
    PARAMETERS,
    Parameter,
    gradients,
    make,
    run_backward,
    use,
)
from tests.support.identity import event
from zrpc.errors import RpcError
from zrpc.optim import DistributedOptimizer
from zrpc.services.autograd import engine
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

SOON = 20.0
# How long the tests watch that something does not happen.
NOT_YET = 0.3


class Gated(torch.optim.SGD):
    """Its step waits while ``.grad`` is the gradient of the step's context."""

    def step(self) -> None:
        event("in the step").set()
        assert event("let the step end").wait(SOON)
        super().step()


def parameter(mesh: Mesh, name: str = "w") -> Parameter:
    """A parameter of worker1, 0, whose ``.grad`` is 7, a gradient of ordinary training."""
    rref: Parameter = mesh.run(0, make, name, 1, (0.0,))
    PARAMETERS[name].grad = torch.full((1,), 7.0, dtype=torch.float64)
    return rref


def trainer(mesh: Mesh, optimizer_class: Any, w: Parameter, before_step: Any = None) -> None:
    """Subtracts 10 from a parameter."""
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        optimizer = DistributedOptimizer(optimizer_class, [w], lr=1.0)
        run_backward(context_id, [w], 10.0)
        if before_step is not None:
            before_step()
        optimizer.step(context_id)


def gradient_of_pass(mesh: Mesh, w: Parameter) -> float | None:
    """The gradient of a parameter in a context of its own: 1, if nothing interferes."""
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [zrpc.rpc_sync("worker1", use, (w, 1.0))])
        found = gradients(w, context_id)
        return None if found is None else found.item()


def state_of(name: str = "w") -> tuple[float, float]:
    """A parameter's value and its ``.grad``."""
    found = PARAMETERS[name]
    assert found.grad is not None
    return found.item(), found.grad.item()


def on_accumulated(hook: Callable[[torch.Tensor], None], name: str = "w") -> None:
    PARAMETERS[name].register_post_accumulate_grad_hook(hook)


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of worker1 are those of a DDP module."""
    monkeypatch.setattr(
        engine.ddp,
        "reduced_with",
        lambda leaves: [leaf for leaf in leaves if any(leaf is p for p in PARAMETERS.values())],
    )


@pytest.mark.system
@pytest.mark.parametrize("kind", ["hooks", "reduced"])
def test_a_pass_waits_for_a_step(mesh: Mesh, request: pytest.FixtureRequest, kind: str) -> None:
    """With hooks on the parameter, or if it is part of a DDP module."""
    w = parameter(mesh)
    in_hook = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        stepped = pool.submit(trainer, mesh, Gated, w)
        assert event("in the step").wait(SOON)
        if kind == "reduced":
            request.getfixturevalue("reduced")
            PARAMETERS["w"].register_hook(lambda _: in_hook.set())
        else:
            on_accumulated(lambda _: in_hook.set())
        passed = pool.submit(gradient_of_pass, mesh, w)
        assert not in_hook.wait(NOT_YET)
        event("let the step end").set()
        stepped.result(SOON)
        assert passed.result(SOON) == 1.0
    assert in_hook.is_set()
    assert state_of() == (-10.0, 7.0)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["hooks", "reduced"])
def test_a_step_waits_for_a_pass(mesh: Mesh, request: pytest.FixtureRequest, kind: str) -> None:
    w = parameter(mesh)
    ready, in_hook, hook_may_end = threading.Event(), threading.Event(), threading.Event()

    def before_step() -> None:
        if kind == "reduced":
            request.getfixturevalue("reduced")
        on_accumulated(wait_in_hook)
        ready.set()
        assert in_hook.wait(SOON)

    def wait_in_hook(_: torch.Tensor) -> None:
        in_hook.set()
        assert hook_may_end.wait(SOON)

    event("let the step end").set()
    with ThreadPoolExecutor(2) as pool:
        stepped = pool.submit(trainer, mesh, Gated, w, before_step)
        assert ready.wait(SOON)
        passed = pool.submit(gradient_of_pass, mesh, w)
        assert in_hook.wait(SOON)
        assert not event("in the step").wait(NOT_YET)
        hook_may_end.set()
        assert passed.result(SOON) == 1.0
        stepped.result(SOON)
    assert state_of() == (-10.0, 7.0)


def test_a_hook_that_steps(mesh: Mesh) -> None:
    """The step uses the gradient that has just been accumulated; the hook may then clear it."""
    w = parameter(mesh)

    def run() -> Any:
        optimizer = DistributedOptimizer(torch.optim.SGD, [w], lr=1.0)
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


def test_hooks_of_two_passes_that_step_over_both_parameters(mesh: Mesh) -> None:
    """Each has a parameter and would wait for the other's: that is an error, and no deadlock."""
    names = ("a", "b")
    rrefs = [parameter(mesh, name) for name in names]
    both = threading.Barrier(2)
    contexts: dict[str, int] = {}

    def train(index: int) -> None:
        name = names[index]
        with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
            optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
            contexts[name] = context_id

            def step(_: torch.Tensor) -> None:
                both.wait(SOON)
                with mesh.agent(0).as_current():
                    try:
                        optimizer.step(contexts[name])
                    finally:
                        both.wait(SOON)

            on_accumulated(step, name)
            run_backward(context_id, [rrefs[index]])

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(train, index) for index in range(2)]:
            with pytest.raises(RpcError, match="a backward pass of another context uses"):
                future.result(SOON)
    assert [state_of(name) for name in names] == [(0.0, 7.0)] * 2


@pytest.mark.system
def test_trainers_without_locks_over_parameters_with_hooks(mesh: Mesh) -> None:
    """Hogwild: each step uses the gradients of its own context, and none is lost."""
    trainers, rounds = 4, 10
    names = ("a", "b")
    rrefs = [parameter(mesh, name) for name in names]
    hooked: list[float] = []
    for name in names:
        on_accumulated(lambda p: hooked.append(p.grad.item()), name)

    def train(number: int) -> None:
        with mesh.agent(0).as_current():
            optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
            for _ in range(rounds):
                with dist_autograd.context() as context_id:
                    run_backward(context_id, rrefs, number + 1.0)
                    optimizer.step(context_id)

    with ThreadPoolExecutor(trainers) as pool:
        list(pool.map(train, range(trainers)))
    total = rounds * sum(range(1, trainers + 1))
    assert [state_of(name) for name in names] == [(-total, 7.0)] * 2
    assert sorted(hooked) == sorted([n + 1.0 for n in range(trainers)] * rounds * len(names))
