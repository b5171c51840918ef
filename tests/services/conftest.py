"""What the tests of several services share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gates import Gate


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate at which handlers wait; open at the end."""
    with Gate() as gate:
        yield gate
