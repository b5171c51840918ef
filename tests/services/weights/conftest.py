"""What is left after each test of published weights: nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.services.weights.publishing import until_mapped


@pytest.fixture(autouse=True)
def _no_memory_is_left() -> Iterator[None]:
    """No test leaves a segment open or mapped; torn down after the mesh."""
    sys.last_value = sys.last_traceback = sys.last_exc = None  # of a test that failed
    until_mapped(0)
    yield
    until_mapped(0)
