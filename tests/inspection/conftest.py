"""What the tests of inspection share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import waiting


@pytest.fixture
def door() -> Iterator[waiting.Door]:
    """A door of this test's own, which is open when the test ends."""
    waiting.door = waiting.Door()
    yield waiting.door
    waiting.door.opened.set()
