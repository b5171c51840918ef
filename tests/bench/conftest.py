"""Fixtures for the tests of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.support.warm import ForkedServer
from zrpc.bench import run
from zrpc.bench.sampling import Sampling
from zrpc.launch import Starter, make_starter


@pytest.fixture(scope="session", autouse=True)
def _quick_starters() -> Iterator[None]:
    """Has the starters of the benchmark in this process forked, instead of importing torch."""

    def make(
        wanted: str | None = None,
        *,
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Starter:
        return make_starter(wanted, env=env) if wanted else ForkedServer(preload=preload, env=env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_starter", make)
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
