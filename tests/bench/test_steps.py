"""How many steps a call takes, and that the skeleton beside it computes what zrpc does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.own_process import passes_in_its_own_process
from zrpc.bench import skeleton, targets
from zrpc.bench.mesh import Mesh
from zrpc.bench.rows import all_rows
from zrpc.bench.session import Sampling
from zrpc.launch import Starter

# The most that an empty call may enter at each end: functions of zrpc, and modules.
MOST = {"caller": (37, 22), "callee": (33, 22)}
# The most that a call of an actor enters beyond one of an RRef's method, at each end.
MOST_OF_AN_ACTOR = 2
# On a busy machine a worker's thread may sleep instead of polling, which takes other steps.
TRIES = 5


@pytest.mark.parametrize("end", MOST)
def test_a_call_takes_no_more_steps_than_before(end: str, starter: Starter, tiny: Sampling) -> None:
    with Mesh(starter, "zrpc", 2) as mesh:
        for _ in range(TRIES):
            sample = mesh.measure(f"steps:{end}", (), tiny, 60)
            found = int(sample.value), int(sample.more["modules"])
            few = all(n <= most for n, most in zip(found, MOST[end], strict=True))
            if few and sample.more["lines"] > sample.value > 10:
                return
    pytest.fail(f"expected at most {MOST[end]} functions and modules, found {found}")


@pytest.mark.parametrize("end", MOST)
def test_a_call_of_an_actor_takes_at_most_two_functions_more_than_one_of_an_rref(
    end: str, starter: Starter, tiny: Sampling
) -> None:
    with Mesh(starter, "zrpc", 2) as mesh:
        for _ in range(TRIES):
            plain, actor = (mesh.measure(f"steps:{end}", (n,), tiny, 60).value for n in (1, 2))
            if plain > 10 and actor <= plain + MOST_OF_AN_ACTOR:
                return
    pytest.fail(f"expected at most {MOST_OF_AN_ACTOR} more than {plain}, found {actor}")


def test_each_row_of_the_skeleton_has_the_arguments_of_its_limit() -> None:
    rows = [row for row in all_rows() if row.limit and row.limit.name == "skeleton"]
    assert len(rows) == 7
    assert [row.name for row in rows if row.limit and row.limit.arguments != row.arguments] == []


@pytest.mark.system
def test_the_skeleton_sends_tensors_errors_and_many_calls_at_once() -> None:
    with skeleton.start_peer() as end:
        for tensor in (torch.arange(3.0), torch.arange(1 << 18)):
            assert torch.equal(end.call(targets.echo, tensor), tensor)
        with pytest.raises(ZeroDivisionError):
            end.call(divmod, 1, 0)
        calls = [end.begin(targets.echo, number) for number in range(200)]
        assert [end.wait(call) for call in calls] == list(range(200))


@pytest.mark.system
def test_a_step_of_the_skeleton_has_the_gradients_of_one_process() -> None:
    """torch's engine refuses a process that was forked from one with threads of the engine."""
    passes_in_its_own_process(Path(__file__).with_name("skeleton_cases.py"))
