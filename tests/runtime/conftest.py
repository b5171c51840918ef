"""A handler pool that is closed after its test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.pool_jobs import Jobs, MakePool
from tests.support.waiting import SOON
from zrpc.runtime.thread_pool import HandlerPool


@pytest.fixture
def make_pool(no_leaks: None) -> Iterator[MakePool]:
    pools = []

    def make(size: int, **kwargs: Any) -> HandlerPool:
        pools.append(HandlerPool(size, "test-pool", **kwargs))
        return pools[-1]

    yield make
    for pool in pools:
        assert pool.close(SOON)


@pytest.fixture
def jobs(make_pool: MakePool) -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.go.set()
