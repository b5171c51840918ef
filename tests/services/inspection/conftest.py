"""What the tests of inspection share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.inspection import doors
from tests.support.gates import Gate


@pytest.fixture
def door() -> Iterator[Gate]:
    """A door of this test's own, which is open when the test ends."""
    doors.door = Gate()
    yield doors.door
    doors.door.open()
