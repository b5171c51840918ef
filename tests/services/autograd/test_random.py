"""Graphs that are drawn at random, over three workers, have the gradients of local ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    call,
    gradients,
    layers,
    leaf,
    local_gradients,
)
from tests.support.waiting import until
from zrpc.testing import local_mesh

WORKERS = 3
PARAMETERS = [leaf(3, seed=40 + i) for i in range(4)]

# The operations keep values bounded, so that depth does no harm to precision.
UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "half": lambda x: x * 0.5,
    "view": lambda x: x.view(3, 1)[:, 0],
    "roll": lambda x: x.roll(1),
    "in place": lambda x: x.clone().mul_(0.5).add_(0.1),
    "detach": lambda x: x.detach(),
}
BINARY = {
    "add": lambda x, y: (x + y) * 0.5,
    "mul": lambda x, y: torch.tanh(x) * torch.tanh(y),
    "cat": lambda x, y: torch.cat([x[:2], y[1:2]]),
}

# A program is a list of steps over a list of values, which begins with two inputs. Each step
# adds values; its operands are indices, taken modulo the number of values there are.


@dataclass(frozen=True)
class Parameter:
    """Takes a parameter, which other workers may use too."""

    number: int


@dataclass(frozen=True)
class Unary:
    name: str
    x: int


@dataclass(frozen=True)
class Binary:
    name: str
    x: int
    y: int


@dataclass(frozen=True)
class Hop:
    """Runs a program at another worker, or at this one, with some values as its inputs."""

    to: int
    inputs: tuple[int, ...]
    body: tuple[object, ...]
    outputs: tuple[int, ...]
    residual: bool


index = st.integers(0, 7)


def programs(body: Any) -> Any:
    hop = st.builds(
        Hop,
        to=st.integers(0, WORKERS - 1),
        inputs=st.lists(index, min_size=1, max_size=3).map(tuple),
        body=body,
        outputs=st.lists(index, min_size=1, max_size=3).map(tuple),
        residual=st.booleans(),
    )
    step = st.one_of(
        st.builds(Parameter, st.integers(0, len(PARAMETERS) - 1)),
        st.builds(Unary, st.sampled_from(list(UNARY)), index),
        st.builds(Binary, st.sampled_from(list(BINARY)), index, index),
        hop,
        hop,
    )
    return st.lists(step, max_size=5).map(tuple)


PROGRAMS = programs(programs(programs(st.just(()))))


def execute(program: Any, values: Any) -> Any:
    values = list(values)

    def at(number: Any) -> Any:
        return values[-1 - number % len(values)]

    for step in program:
        match step:
            case Parameter(number):
                values.append(PARAMETERS[number])
            case Unary(name, x):
                values.append(UNARY[name](at(x)))
            case Binary(name, x, y):
                values.append(BINARY[name](at(x), at(y)))
            case Hop(to, inputs, body, outputs, residual):
                sent = [at(number) for number in inputs]
                received = call(f"worker{to}", stage, body, sent, outputs)
                if residual:
                    received = [(x + sent[0]) * 0.5 for x in received]
                values.extend(received)
    return values


def stage(body: Any, values: Any, outputs: Any) -> Any:
    values = execute(body, values)
    return [values[-1 - number % len(values)] for number in outputs]


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    with local_mesh(WORKERS, timeout=250) as mesh:
        yield mesh


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    program=PROGRAMS,
    roots=st.lists(index, min_size=1, max_size=3),
    passes=st.integers(1, 2),
)
def test_random_graphs(workers: Any, program: Any, roots: Any, passes: Any) -> None:
    inputs = [leaf(3, seed=1), leaf(3, seed=2)]
    leaves = [*inputs, *PARAMETERS]

    def model() -> Any:
        values = execute(program, inputs)
        chosen = [values[-1 - number % len(values)] for number in roots]
        # Nor leaves nor constants are roots; the inputs make each one depend on something.
        return [(value * inputs[0]).sum() for value in chosen]

    expected = local_gradients(model, leaves, passes)

    def run() -> Any:
        with dist_autograd.context() as context_id:
            found = model()
            for number in range(passes):
                dist_autograd.backward(context_id, found, retain_graph=number < passes - 1)
            return gradients(workers, context_id)

    found = workers.run(0, run)
    for at, gradient in zip(leaves, expected, strict=True):
        assert at.grad is None
        wanted = torch.zeros(3, dtype=torch.float64) if gradient is None else gradient
        torch.testing.assert_close(found.get(at, torch.zeros_like(wanted)), wanted)
    for layer in layers(workers):
        until(lambda layer=layer: len(layer) == 0)
