"""Tests of the outcomes that a soak test's client accepts, without a mesh."""

from __future__ import annotations

import time
from collections import Counter

from zrpc.bench.soak.client import CheckFailed, Client, Tally
from zrpc.bench.soak.leak_check import LeakCheck
from zrpc.bench.soak.resources import Resources
from zrpc.errors import BackwardError, OwnerDied, RpcError, WorkerDied


def tally_of(error: Exception, doomed: str | None = "worker3") -> Tally:
    def action(client: Client) -> None:
        raise error

    peers, weighted = ["worker1", "worker3"], [(action, 1)]
    client = Client("a", "worker0", peers, doomed, time.monotonic(), weighted)
    client.perform(action)
    return client.tally


def test_only_an_error_by_the_death_of_the_doomed_worker_is_no_violation() -> None:
    for error in (
        WorkerDied("worker worker3 (rank 3) is gone"),
        OwnerDied("worker worker3 (rank 3) is gone"),
        BackwardError("Error on Node 1: WorkerDied: worker worker3 (rank 3) is gone"),
    ):
        tally = tally_of(error)
        assert tally.cut_off == {"action": 1}
        assert len(tally.deaths_seen_at) == 1
        assert not tally.violations
        assert len(tally_of(error, doomed=None).violations) == 1
    for other in (
        WorkerDied("worker worker1 (rank 1) is gone"),
        RpcError("worker3 has no such value"),
        ValueError("worker3: WorkerDied"),
        CheckFailed("expected 1, found 2"),
        TimeoutError(),
    ):
        tally = tally_of(other)
        [text] = tally.violations
        assert text.startswith("worker0, a, action 1 (action): Traceback")
        assert type(other).__name__ in text
        assert not tally.cut_off


def resources_with(**more: int) -> Resources:
    values = {"memory": 1 << 26, "blocks": 10**6, "resident": 1 << 28, "threads": 20}
    values |= {"descriptors": 30, **more}
    objects = Counter({"zrpc.services.rref.rref.RRef": values.pop("rrefs", 0)})
    return Resources(leftovers=[], objects=objects, **values)


def test_a_resource_that_grows_too_much_is_a_violation() -> None:
    for name, value, what in (
        ("memory", (1 << 26) + (7 << 20), "bytes in use by malloc"),
        ("blocks", 1_031_000, "1031000 blocks in use by Python, 1000000 before"),
        ("resident", 1 << 30, "resident bytes"),
        ("threads", 61, "61 threads, 20 before"),
        ("descriptors", 71, "descriptors"),
        ("rrefs", 101, "101 objects of zrpc.services.rref.rref.RRef, 0 before"),
    ):
        check = LeakCheck()
        check.add({0: resources_with(), 1: resources_with()})
        check.add({0: resources_with(), 1: resources_with(**{name: value})})
        [text] = check.violations()
        assert text.startswith("rank 1 has grown")
        assert what in text
        check.remove(1)
        assert check.violations() == []
