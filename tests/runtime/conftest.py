"""A handler pool that is closed after its test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.pool_jobs import SOON, Jobs, MakePool
from zrpc.runtime.thread_pool import HandlerPool


@pytest.fixture
def make_pool(no_leaks: None) -> Iterator[MakePool]:
    pools = []
    gates = []

    def make(size: int, **kwargs: Any) -> HandlerPool:
        pools.append(HandlerPool(size, "test-pool", **kwargs))
        return pools[-1]

    make.gates = gates
    yield make
    for gate in gates:
        gate.set()
    for pool in pools:
        assert pool.close(SOON)


@pytest.fixture
def jobs(make_pool: MakePool) -> Jobs:
    return Jobs(make_pool)
