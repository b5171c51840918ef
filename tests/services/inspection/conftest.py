"""What the tests of inspection share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.services.inspection import doors
from tests.support.gates import Gate


@pytest.fixture
def seems_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets threads that wait seem to work, so that nobody takes their place."""
    used = itertools.count()
    monkeypatch.setattr(
        "zrpc.runtime.unseen_waits.processor_time_of", lambda ident: float(next(used))
    )


@pytest.fixture
def door() -> Iterator[Gate]:
    """A door of this test's own, which is open when the test ends."""
    doors.door = Gate()
    yield doors.door
    doors.door.open()
