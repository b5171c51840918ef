"""Chains of futures, and what futures hold."""

from __future__ import annotations

import threading
from typing import Any


def caught(future: Any) -> Any:
    """The class of a future's error."""
    try:
        future.value()
    except BaseException as error:
        return type(error)
    return None


def chain(first: Any, length: int) -> Any:
    for _ in range(length):
        first = first.then(lambda f: f.wait() + 1)
    return first


def result_within(future: Any, seconds: float) -> Any:
    """The future's value, waited for in a way that a future that stays open can't hold up."""
    done = threading.Event()
    future.add_done_callback(lambda f: done.set())
    assert done.wait(seconds)
    return future.value()
