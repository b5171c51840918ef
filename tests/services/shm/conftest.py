"""What the tests of shared memory share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.services.shm.sharing import (
    kept,
    segments_mapped,
    segments_open,
    service_of,
    until_returned,
)
from tests.support.waiting import until
from zrpc.services.shm.segments import SegmentPool
from zrpc.testing import Mesh


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test leaves a segment open or mapped; torn down after the mesh."""
    # What a test that failed was using lives on in its traceback.
    sys.last_value = sys.last_traceback = sys.last_exc = None
    gc.collect()
    before = (segments_open(), segments_mapped())
    yield
    kept().clear()

    def left() -> tuple[list[int], list[int]]:
        return segments_open(), segments_mapped()

    until(
        lambda: left() == before,
        lambda: f"{left()} open, mapped; expected {before}",
        within=5,
        collect=True,
    )


@dataclass(frozen=True)
class Lend:
    """A message that went by shared memory: whose pool lent to whom, which segment, for what."""

    pool: SegmentPool
    borrower: int
    number: int
    sizes: list[int]


@pytest.fixture
def lends(monkeypatch: pytest.MonkeyPatch) -> list[Lend]:
    """All that is lent from now on by agents of this process, in order."""
    made: list[Lend] = []
    lend = SegmentPool.lend

    def recorded(self: SegmentPool, sizes: list[int], borrower: int) -> Any:
        lent = lend(self, sizes, borrower)
        if lent is not None:
            made.append(Lend(self, borrower, lent[0].number, list(sizes)))
        return lent

    monkeypatch.setattr(SegmentPool, "lend", recorded)
    return made


@pytest.fixture
def joined(mesh: Mesh) -> Iterator[Mesh]:
    """A mesh of threads; worker0 is the test itself. In the end all that was lent is returned."""
    with mesh.agent(0).as_current():
        yield mesh
    kept().clear()
    for rank in range(len(mesh)):
        until_returned(service_of(mesh, rank))
