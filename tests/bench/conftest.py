"""One warm fork server for all tests of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zrpc.bench.effort import Effort
from zrpc.bench.run import warm_starter
from zrpc.launch import Starter


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    with warm_starter() as started:
        yield started


@pytest.fixture(scope="session")
def tiny() -> Effort:
    """Whether it works, not how fast it is."""
    return Effort(seconds=0.0, least=1, scale=0.02)
