"""Signal handlers that interrupt any step of a push or a load: they do the same, or raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.behaviour.signal_steps_cases import Interruption, send
from tests.services.weights.publishing import Learner, Rollout, pool_of, value_of
from tests.support.handled import signal_handlers
from tests.support.observed import living
from tests.support.steps import at_step, some_steps
from tests.support.waiting import until
from zrpc.services.shm.segments import Segment
from zrpc.testing import Mesh

pytestmark = [pytest.mark.system, pytest.mark.zrpc(workers=2, timeout=120)]


class Program:
    """A publisher and a subscriber of the main thread's worker, and a subscriber elsewhere."""

    def __init__(self, mesh: Mesh) -> None:
        self.learner = Learner(mesh)
        self.near, self.far = Rollout(mesh, 0), Rollout(mesh, 1)
        self.versions: list[int] = []

    def push(self) -> None:
        self.versions.append(self.learner.published.push())

    def load(self) -> None:
        self.near.subscriber.load_into(self.near.model, timeout=20)

    def push_and_load(self) -> None:
        self.push()
        self.load()


@pytest.fixture
def program(mesh: Mesh) -> Iterator[Program]:
    with mesh.agent(0).as_current():
        program = Program(mesh)
        program.push_and_load()
        yield program


@pytest.fixture
def handle() -> Iterator[Callable[[Callable[[], object]], None]]:
    with signal_handlers() as handle:
        yield lambda function: handle(lambda *_: function())


def test_a_handler_pushes_and_loads_at_any_step(program: Program, handle: Any) -> None:
    handle(program.push_and_load)
    for number in some_steps(program.push_and_load):
        with at_step(number, send) as steps:
            program.push_and_load()
        program.load()
        newest = program.learner.published.version
        assert program.near.subscriber.version == newest, steps.place
        assert program.far.load() == newest, steps.place
    assert len(set(program.versions)) == len(program.versions)


def test_what_a_handler_raises_leaves_no_half_version_and_no_memory(
    mesh: Mesh, program: Program, handle: Any
) -> None:
    def fail() -> None:
        raise Interruption

    handle(fail)
    model = program.learner.model
    for number in some_steps(program.push_and_load):
        for tensor in model.values():
            tensor.fill_(number)
        before = program.near.value
        with at_step(number, send) as steps:
            try:
                program.push_and_load()
            except Interruption as error:
                error.__traceback__ = None
        assert program.near.value in (before, number), steps.place
        program.push_and_load()
        assert program.near.value == number == value_of(model), steps.place
        assert program.far.load() == program.learner.published.version
    assert program.versions == sorted(set(program.versions))
    pool = pool_of(mesh)
    until(lambda: len(pool) <= 4 and not any(each.writing for each in living(Segment)))
    assert torch.equal(program.far.model["a"], model["a"])
