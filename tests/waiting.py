"""Waiting for what other threads bring about, and of which no event tells."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within: float = 10.0) -> None:
    """Returns once it is true, and fails where it is not within so many seconds."""
    limit = time.monotonic() + within
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)
