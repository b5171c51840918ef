"""Graphs that are drawn at random, over four workers, have the gradients of local ones.

With branches that lead to no root and must not be run, hooks, changes in place and custom
Functions; in several threads at once, and over TCP with a DDP module. CONTRIBUTING.md says how to
run it for longer; only then parts of the graphs are compiled, since torch's compiler takes long
to start.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    call,
    gradients,
    layers,
    leaf,
    local_gradients,
)
from tests.support.waiting import SOON, until
from zrpc.testing import local_mesh

WORKERS = 4
EXAMPLES = int(os.environ.get("ZRPC_AUTOGRAD_GRAPHS", "100"))
# The other ways to run graphs cost more, and find less.
FEWER = max(10, EXAMPLES // 5)
IS_LONG = EXAMPLES > 100
PARAMETERS = [leaf(3, seed=40 + i) for i in range(4)]


class Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return -gradient * x.sin()


class Trap(torch.autograd.Function):
    """Must not be run."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise AssertionError("what leads to no root was run")


def hooked(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


def freed(x: torch.Tensor) -> torch.Tensor:
    """What a handler that trains by itself returns; only for what leads to no root."""
    leaf = x.detach().requires_grad_()
    loss = (leaf**2).sum() * PARAMETERS[0]
    torch.autograd.grad(loss.sum(), leaf)
    return loss


def changed(x: torch.Tensor) -> torch.Tensor:
    """Saved, and then changed in place; only for what leads to no root."""
    saved = PARAMETERS[1].exp()
    result = saved * x
    with torch.no_grad():
        saved.zero_()
    return result


def trapped(x: torch.Tensor) -> torch.Tensor:
    return Trap.apply(x * PARAMETERS[2])


# The operations keep values bounded, so that depth does no harm to precision.
UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "half": lambda x: x * 0.5,
    "view": lambda x: x.view(3, 1)[:, 0],
    "roll": lambda x: x.roll(1),
    "in place": lambda x: x.clone().mul_(0.5).add_(0.1),
    "detach": lambda x: x.detach(),
    "function": Cosine.apply,
    "hook": hooked,
}
if IS_LONG:
    # Without the part of the compiler that writes C++.
    UNARY["compiled"] = torch.compile(lambda x: torch.sin(x) * x.cos() * 0.5, backend="aot_eager")
UNUSED = [freed, changed, trapped]
BINARY = {
    "add": lambda x, y: (x + y) * 0.5,
    "mul": lambda x, y: torch.tanh(x) * torch.tanh(y),
    "cat": lambda x, y: torch.cat([x[:2], y[1:2]]),
}

# A program is a list of steps over a list of values, which begins with two inputs. Each step
# adds values; its operands are indices, taken modulo the number of values there are.
#
# ("parameter", number): takes a parameter, which other workers may use too.
# ("unary", name, x) and ("binary", name, x, y): an operation.
# ("hop", to, inputs, body, outputs, residual): runs a program at another worker, or at this one,
#     with some values as its inputs.
# ("unused", to, x, kind, returned): sends to a worker, or has it return, what leads to no root.

index = st.integers(0, 7)
indices = st.lists(index, min_size=1, max_size=3).map(tuple)
worker = st.integers(0, WORKERS - 1)


def step_of(kind: str, *parts: Any) -> Any:
    return st.tuples(st.just(kind), *parts)


def programs(body: Any) -> Any:
    hop = step_of("hop", worker, indices, body, indices, st.booleans())
    step = st.one_of(
        step_of("parameter", st.integers(0, len(PARAMETERS) - 1)),
        step_of("unary", st.sampled_from(list(UNARY)), index),
        step_of("binary", st.sampled_from(list(BINARY)), index, index),
        step_of("unused", worker, index, st.integers(0, len(UNUSED) - 1), st.booleans()),
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
            case ("parameter", number):
                values.append(PARAMETERS[number])
            case ("unary", name, x):
                values.append(UNARY[name](at(x)))
            case ("binary", name, x, y):
                values.append(BINARY[name](at(x), at(y)))
            case ("unused", to, x, kind, returned):
                if returned:
                    call(f"worker{to}", UNUSED[kind], at(x))
                else:
                    call(f"worker{to}", torch.sin, UNUSED[kind](at(x)))
            case ("hop", to, inputs, body, outputs, residual):
                sent = [at(number) for number in inputs]
                received = call(f"worker{to}", stage, body, sent, outputs)
                if residual:
                    received = [(x + sent[0]) * 0.5 for x in received]
                values.extend(received)
    return values


def stage(body: Any, values: Any, outputs: Any) -> Any:
    values = execute(body, values)
    return [values[-1 - number % len(values)] for number in outputs]


ROOTS = st.lists(index, min_size=1, max_size=3)
PASSES = st.integers(1, 2)


def thorough(examples: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, suppress_health_check=checks)


def start(**options: Any) -> Any:
    return local_mesh(WORKERS, timeout=250 + EXAMPLES, options=options)


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    with start() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def tcp_workers() -> Iterator[Any]:
    with start(transport="tcp") as mesh:
        yield mesh


class Scale(torch.nn.Module):
    """Has one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(leaf(3, seed=50).detach())

    def forward(self, x: Any) -> Any:
        return torch.tanh(x * self.weight)


@pytest.fixture(scope="module")
def reduced() -> Iterator[DistributedDataParallel]:
    """A DDP module; it is alone in its group, so that its averages are its own gradients."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{directory}/group", 1), rank=0, world_size=1
        )
        try:
            yield DistributedDataParallel(Scale())
        finally:
            dist.destroy_process_group()


class Case:
    """A program with its gradients in one process.

    Args:
        program: the program.
        roots: which of its values are used for the loss.
        passes: how many passes go over its graph.
        reduced: a DDP module that makes the first input, and leads to a root.
    """

    def __init__(self, program: Any, roots: Any, passes: int, reduced: Any = None) -> None:
        self._program, self._roots, self._passes = program, roots, passes
        self._reduced = reduced
        self._inputs = [leaf(3, seed=1), leaf(3, seed=2)]
        self._leaves = [*self._inputs, *PARAMETERS]
        plain = None if reduced is None else reduced.module
        if plain is not None:
            self._leaves.append(plain.weight)
        self._expected = local_gradients(lambda: self._model(plain), self._leaves, passes)

    def _model(self, module: Any) -> Any:
        first, second = self._inputs
        values = execute(self._program, [first if module is None else module(first), second])
        chosen = [values[-1 - number % len(values)] for number in self._roots]
        # Nor leaves nor constants are roots; the inputs make each one depend on something.
        roots = [(value * first).sum() for value in chosen]
        return roots if module is None else [*roots, values[0].sum()]

    def run(self, workers: Any) -> Any:
        """Returns the gradients of the program, run over the workers."""
        with dist_autograd.context() as context_id:
            found = self._model(self._reduced)
            for number in range(self._passes):
                dist_autograd.backward(context_id, found, retain_graph=number < self._passes - 1)
            return gradients(workers, context_id)

    def check(self, found: Any) -> None:
        """Compares the gradients with the local ones."""
        for at, gradient in zip(self._leaves, self._expected, strict=True):
            assert at.grad is None
            assert (at in found) == (gradient is not None)
            if gradient is not None:
                torch.testing.assert_close(found[at], gradient)


def check_at_once(workers: Any, cases: list[Case]) -> None:
    """Runs each case on another worker, all at the same time."""
    futures = [workers.submit(rank, case.run, workers) for rank, case in enumerate(cases)]
    found = [future.result(SOON) for future in futures]
    for case, gradients_of_case in zip(cases, found, strict=True):
        case.check(gradients_of_case)
    for layer in layers(workers):
        until(lambda layer=layer: len(layer) == 0)


@pytest.mark.system
@thorough(EXAMPLES)
@given(program=PROGRAMS, roots=ROOTS, passes=PASSES)
def test_random_graphs(workers: Any, program: Any, roots: Any, passes: Any) -> None:
    check_at_once(workers, [Case(program, roots, passes)])


@pytest.mark.system
@thorough(FEWER)
@given(program=PROGRAMS, roots=ROOTS)
def test_random_graphs_with_a_ddp_module_over_tcp(
    tcp_workers: Any, reduced: Any, program: Any, roots: Any
) -> None:
    check_at_once(tcp_workers, [Case(program, roots, 1, reduced)])


@pytest.fixture
def _hooked() -> Iterator[None]:
    """Half of the parameters have hooks on their accumulated gradients."""
    hooks = [p.register_post_accumulate_grad_hook(lambda _: None) for p in PARAMETERS[:2]]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.system
@pytest.mark.usefixtures("_hooked")
@thorough(FEWER)
@given(
    cases=st.lists(st.tuples(PROGRAMS, ROOTS, PASSES), min_size=2, max_size=WORKERS),
)
def test_random_graphs_at_once_over_the_same_parameters(workers: Any, cases: Any) -> None:
    check_at_once(workers, [Case(*case) for case in cases])
