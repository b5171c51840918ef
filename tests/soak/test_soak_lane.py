"""What a lane of a soak test takes for right and for wrong, without a mesh."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from zrpc.errors import BackwardError, OwnerDied, RpcError, WorkerDied
from zrpc.soak import lane as lanes
from zrpc.soak.calls import same
from zrpc.soak.growth import Growth
from zrpc.soak.inventory import Inventory
from zrpc.soak.lane import Action, Failed, Lane, Tally


def make_lane(*actions: Action, doomed: str | None = "worker3", seconds: float = 0.0) -> Lane:
    until = time.monotonic() + seconds
    weighted = [(action, 1) for action in actions]
    return Lane("a", "seed", "worker0", ["worker1", "worker3"], doomed, until, weighted, False)


def tally_of(error: Exception | None, doomed: str | None = "worker3") -> Tally:
    def action(lane: Lane) -> None:
        if error is not None:
            raise error

    lane = make_lane(doomed=doomed)
    lane.do(action)
    return lane.tally


def test_what_is_right_is_counted() -> None:
    tally = tally_of(None)
    assert tally.done == {"action": 1}
    assert not tally.cut
    assert not tally.violations


@pytest.mark.parametrize(
    "error",
    [
        WorkerDied("worker worker3 (rank 3) is gone"),
        OwnerDied("worker worker3 (rank 3) is gone"),
        BackwardError("Error on Node 1: WorkerDied: worker worker3 (rank 3) is gone"),
    ],
)
def test_the_death_of_the_doomed_is_no_violation(error: Exception) -> None:
    tally = tally_of(error)
    assert tally.cut == {"action": 1}
    assert len(tally.met) == 1
    assert not tally.violations
    # Where nobody is to die, it is one.
    assert len(tally_of(error, doomed=None).violations) == 1


@pytest.mark.parametrize(
    "error",
    [
        WorkerDied("worker worker1 (rank 1) is gone"),
        RpcError("worker3 has no such value"),
        ValueError("worker3: WorkerDied"),
        Failed("expected 1, found 2"),
        TimeoutError(),
    ],
)
def test_all_other_errors_are_violations(error: Exception) -> None:
    tally = tally_of(error)
    [text] = tally.violations
    assert text.startswith("worker0, a, action 1 (action): Traceback")
    assert repr(type(error).__name__)[1:-1] in text
    assert not tally.done
    assert not tally.cut


def test_what_takes_too_long_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_MOST_SECONDS", 0.0)
    [text] = tally_of(None).violations
    assert "it took 0.0 s" in text


def test_a_lane_does_the_same_for_the_same_seed_and_stops_after_a_violation() -> None:
    found: list[list[Any]] = [[], []]
    for values in found:

        def note(lane: Lane, values: list[Any] = values) -> None:
            values.append((lane.whole(), lane.peer(), lane.way(3), lane.key()))
            if len(values) == 10:
                lane.expect("the end", 1, 2)

        lane = make_lane(note, seconds=60.0)
        lane.run()
        assert len(lane.tally.violations) == 1
    assert found[0] == found[1]
    assert len(found[0]) == 10


@pytest.mark.parametrize(
    "other",
    [torch.tensor([1, 3]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor([])],
)
def test_tensors_that_differ(other: torch.Tensor) -> None:
    same("equal", torch.tensor([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(Failed, match="what: expected"):
        same("what", torch.tensor([1, 2]), other)


def inventory(**more: int) -> Inventory:
    values = {"memory": 1 << 26, "blocks": 10**6, "resident": 1 << 28, "threads": 20}
    values |= {"descriptors": 30, **more}
    objects = Counter({"zrpc.rref.rref.RRef": values.pop("rrefs", 0)})
    return Inventory(left=[], objects=objects, **values)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"memory": (1 << 26) + (7 << 20)}, "bytes of malloc's in use"),
        ({"blocks": 1_031_000}, "1031000 blocks of Python's in use, 1000000 before"),
        ({"resident": 1 << 30}, "resident bytes"),
        ({"threads": 61}, "61 threads, 20 before"),
        ({"descriptors": 71}, "descriptors"),
        ({"rrefs": 101}, "101 objects of zrpc.rref.rref.RRef, 0 before"),
    ],
)
def test_what_grows_too_much(more: dict[str, int], what: str) -> None:
    growth = Growth()
    growth.add({0: inventory(), 1: inventory()})
    growth.add({0: inventory(), 1: inventory(**more)})
    [text] = growth.violations()
    assert text.startswith("rank 1 has grown")
    assert what in text
    growth.forget(1)
    assert growth.violations() == []
