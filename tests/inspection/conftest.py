"""What the tests of inspection share."""

from __future__ import annotations

from collections.abc import Iterator

import doors
import pytest


@pytest.fixture
def door() -> Iterator[doors.Door]:
    """A door of this test's own, which is open when the test ends."""
    doors.door = doors.Door()
    yield doors.door
    doors.door.opened.set()
