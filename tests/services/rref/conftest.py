"""A mesh in which the test itself is worker0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zrpc.testing import Mesh


@pytest.fixture
def caller(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh, with the agent of worker0 as the test's current one."""
    with mesh.agent(0).as_current():
        yield mesh
