"""Waiting for what other threads and processes bring about without an event."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

# The limit of every wait of the tests, in seconds. Only a broken test comes near it, even on a
# busy machine.
SOON = 20.0
_POLL_SECONDS = 0.002
_COLLECT_SECONDS = 0.05


def until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "",
    *,
    within: float = SOON,
    collect: bool = False,
) -> T:
    """Returns the condition's first true value.

    Args:
        condition: is asked again and again.
        what: what is waited for, for the error; may be a function that says it at the end.
        within: seconds after which it fails.
        collect: whether to run the garbage collector between.
    """
    deadline = time.monotonic() + within
    next_collection = 0.0
    while not (value := condition()):
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"not in time: {what() if callable(what) else what or condition}")
        if collect and now > next_collection:
            gc.collect()
            next_collection = now + _COLLECT_SECONDS
        time.sleep(_POLL_SECONDS)
    return value


def pending(future: Future[Any], seconds: float) -> bool:
    """Returns whether a future is not done after some seconds."""
    return not wait([future], seconds).done
