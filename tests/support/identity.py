"""Objects that arrive at another worker as themselves: in a mesh of threads it is this process.

What travels this way is kept until the end of the test.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

C = TypeVar("C", "dict[Any, Any]", "list[Any]")

_lock = threading.Lock()  # guards the two dicts
_objects: dict[int, Any] = {}
_events: dict[Hashable, threading.Event] = {}
_numbers = itertools.count()
_containers: list[Any] = []


class Same:
    """Base of a class whose objects are not copied when they are sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        with _lock:
            number = next(_numbers)
            _objects[number] = self
        return _find, (number,)


def _find(number: int) -> Any:
    return _objects[number]


class Here(Same):
    """A function of a test as one that all workers have; pickled, it goes with copies."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)


def here(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that can be sent: a local one as the same, others by their name."""
    return Here(fn) if "<locals>" in getattr(fn, "__qualname__", "") else fn


def event(key: Hashable) -> threading.Event:
    """Returns the test's event of that name, which a handler finds by it."""
    with _lock:
        return _events.setdefault(key, threading.Event())


def emptied(container: C) -> C:
    """Returns the list or dict; from now on it is emptied after each test."""
    _containers.append(container)
    return container


def forget() -> None:
    """Sets all events, so that no handler goes on waiting, and forgets what was kept."""
    with _lock:
        for each in _events.values():
            each.set()
        _events.clear()
        _objects.clear()
    for container in _containers:
        container.clear()
