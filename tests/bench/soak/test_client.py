"""Tests of the outcomes that a soak test's client accepts, without a mesh."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from zrpc.bench.soak import client as client_module
from zrpc.bench.soak.calls import same
from zrpc.bench.soak.client import Action, CheckFailed, Client, Tally
from zrpc.bench.soak.leak_check import LeakCheck
from zrpc.bench.soak.resources import Resources
from zrpc.errors import BackwardError, OwnerDied, RpcError, WorkerDied


def make_client(*actions: Action, doomed: str | None = "worker3", seconds: float = 0.0) -> Client:
    until = time.monotonic() + seconds
    weighted = [(action, 1) for action in actions]
    return Client("a", "seed", "worker0", ["worker1", "worker3"], doomed, until, weighted, False)


def tally_of(error: Exception | None, doomed: str | None = "worker3") -> Tally:
    def action(client: Client) -> None:
        if error is not None:
            raise error

    client = make_client(doomed=doomed)
    client.perform(action)
    return client.tally


def test_an_action_that_succeeds_is_counted() -> None:
    tally = tally_of(None)
    assert tally.done == {"action": 1}
    assert not tally.cut_off
    assert not tally.violations


@pytest.mark.parametrize(
    "error",
    [
        WorkerDied("worker worker3 (rank 3) is gone"),
        OwnerDied("worker worker3 (rank 3) is gone"),
        BackwardError("Error on Node 1: WorkerDied: worker worker3 (rank 3) is gone"),
    ],
)
def test_an_error_by_the_death_of_the_doomed_worker_is_no_violation(error: Exception) -> None:
    tally = tally_of(error)
    assert tally.cut_off == {"action": 1}
    assert len(tally.deaths_seen_at) == 1
    assert not tally.violations
    # If no worker is doomed, it is a violation.
    assert len(tally_of(error, doomed=None).violations) == 1


@pytest.mark.parametrize(
    "error",
    [
        WorkerDied("worker worker1 (rank 1) is gone"),
        RpcError("worker3 has no such value"),
        ValueError("worker3: WorkerDied"),
        CheckFailed("expected 1, found 2"),
        TimeoutError(),
    ],
)
def test_all_other_errors_are_violations(error: Exception) -> None:
    tally = tally_of(error)
    [text] = tally.violations
    assert text.startswith("worker0, a, action 1 (action): Traceback")
    assert repr(type(error).__name__)[1:-1] in text
    assert not tally.done
    assert not tally.cut_off


def test_an_action_that_takes_too_long_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MAX_ACTION_SECONDS", 0.0)
    [text] = tally_of(None).violations
    assert "it took 0.0 s" in text


def test_a_client_does_the_same_for_the_same_seed_and_stops_after_a_violation() -> None:
    found: list[list[Any]] = [[], []]
    for values in found:

        def note(client: Client, values: list[Any] = values) -> None:
            values.append(
                (
                    client.random_int(),
                    client.random_peer(),
                    client.random_route(3),
                    client.unique_key(),
                )
            )
            if len(values) == 10:
                client.expect("the end", 1, 2)

        client = make_client(note, seconds=60.0)
        client.run()
        assert len(client.tally.violations) == 1
    assert found[0] == found[1]
    assert len(found[0]) == 10


@pytest.mark.parametrize(
    "other",
    [torch.tensor([1, 3]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor([])],
)
def test_tensors_that_differ_are_noticed(other: torch.Tensor) -> None:
    same("equal", torch.tensor([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(CheckFailed, match="what: expected"):
        same("what", torch.tensor([1, 2]), other)


def resources_with(**more: int) -> Resources:
    values = {"memory": 1 << 26, "blocks": 10**6, "resident": 1 << 28, "threads": 20}
    values |= {"descriptors": 30, **more}
    objects = Counter({"zrpc.services.rref.rref.RRef": values.pop("rrefs", 0)})
    return Resources(leftovers=[], objects=objects, **values)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"memory": (1 << 26) + (7 << 20)}, "bytes in use by malloc"),
        ({"blocks": 1_031_000}, "1031000 blocks in use by Python, 1000000 before"),
        ({"resident": 1 << 30}, "resident bytes"),
        ({"threads": 61}, "61 threads, 20 before"),
        ({"descriptors": 71}, "descriptors"),
        ({"rrefs": 101}, "101 objects of zrpc.services.rref.rref.RRef, 0 before"),
    ],
)
def test_a_resource_that_grows_too_much_is_a_violation(more: dict[str, int], what: str) -> None:
    check = LeakCheck()
    check.add({0: resources_with(), 1: resources_with()})
    check.add({0: resources_with(), 1: resources_with(**more)})
    [text] = check.violations()
    assert text.startswith("rank 1 has grown")
    assert what in text
    check.remove(1)
    assert check.violations() == []
