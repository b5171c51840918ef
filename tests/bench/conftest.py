"""Fixtures for the tests of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.warm import ForkedServer
from zrpc.bench import run
from zrpc.bench.session import Sampling
from zrpc.launch import Starter


@pytest.fixture(scope="session", autouse=True)
def _quick_starters() -> Iterator[None]:
    """Has the starters of the benchmark in this process forked, instead of importing torch."""

    def make(method: str = "fork", **options: Any) -> Starter:
        return (ForkedServer if method == "fork" else Starter)(method, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Starter", make)
        yield


@pytest.fixture(scope="session")
def starter(_quick_starters: None) -> Iterator[Starter]:
    """One warm fork server for all tests."""
    with run.warm_starter() as started:
        yield started


@pytest.fixture(scope="session")
def tiny() -> Sampling:
    """The shortest possible sampling: the tests don't compare speeds."""
    return Sampling(seconds=0.0, min_repeats=1, scale=0.02)
