"""What is computed of meshes that are not measured."""

from __future__ import annotations

import pytest

from zrpc.bench.scale import Point, compute


def point(workers: int, failed: str | None = None, library: str = "zrpc") -> Point:
    values = {
        "init": 0.001 * workers**2,
        "call": 0.0001,
        "in turn": 0.0002,
        "descriptors": 20.0 + 5 * workers,
        "threads": 6.0,
        "memory": 1e7 + 1e5 * workers,
        "push": 0.001,
        "all-to-all": 0.001,
    }
    return Point(library, workers, values, failed)


def test_what_a_worker_uses_grows_by_the_same_amount_with_each_peer() -> None:
    (found,) = compute([point(2), point(8), point(64)], [1024])
    assert found.computed
    assert (found.library, found.workers) == ("zrpc", 1024)
    assert found.values == {
        "init": pytest.approx(0.001 * 1024**2),
        "descriptors": pytest.approx(20 + 5 * 1024),
        "threads": pytest.approx(6),
        "memory": pytest.approx(1e7 + 1e5 * 1024),
    }


def test_nothing_is_computed_from_less_than_two_meshes() -> None:
    assert compute([point(8), point(64, failed="hung")], [1024]) == []
    assert compute([point(8), point(64, library="torch")], [1024]) == []
