"""Fixtures for the tests of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zrpc.bench.run import warm_starter
from zrpc.bench.sampling import Sampling
from zrpc.launch import Starter


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    """One warm fork server for all tests."""
    with warm_starter() as started:
        yield started


@pytest.fixture(scope="session")
def tiny() -> Sampling:
    """The shortest possible sampling: the tests don't compare speeds."""
    return Sampling(seconds=0.0, min_repeats=1, scale=0.02)
