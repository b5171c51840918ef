"""What the tests of several services share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.elastic.conftest import elastic  # noqa: F401
from tests.support.gates import Gate


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate at which handlers wait; open at the end."""
    with Gate() as gate:
        yield gate
