"""What the tests of groups share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.shm.conftest import _nothing_is_left  # noqa: F401
from tests.support.gates import Gate
from zrpc.testing import Mesh


@pytest.fixture
def joined(mesh: Mesh) -> Iterator[Mesh]:
    """A mesh of threads; worker0 is the test itself."""
    with mesh.agent(0).as_current():
        yield mesh


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate at which handlers wait; open at the end."""
    gate = Gate()
    yield gate
    gate.open()
