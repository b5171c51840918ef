"""What the tests of calls have other workers run, importable there by name."""

from __future__ import annotations

import itertools
import threading
from typing import Any, ClassVar

# For every wait in a handler; no test comes near it unless something is broken.
PATIENCE = 20.0


class Gate:
    """A handler that waits: the test sees it enter, and lets it go. In meshes of threads.

    As an argument it is the same gate at the other worker, which is in this process.
    """

    _all: ClassVar[dict[int, Gate]] = {}
    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self._all[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_gate, (self.number,)

    def wait_inside(self, result: Any = None) -> Any:
        """What is called remotely."""
        self.entered.release()
        assert self.opened.wait(PATIENCE), "nobody has opened the gate"
        return result

    def await_entry(self, count: int = 1) -> None:
        """Waits until so many are inside."""
        for _ in range(count):
            assert self.entered.acquire(timeout=PATIENCE), "nobody has come to the gate"

    def open(self) -> None:
        self.opened.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()


def _find_gate(number: int) -> Gate:
    return Gate._all[number]


def echo(*args: Any, **kwargs: Any) -> Any:
    """The arguments as they arrived."""
    if kwargs:
        return args, kwargs
    return args[0] if len(args) == 1 else args


def fail(error: BaseException) -> Any:
    raise error


def fail_with(kind: type[BaseException], *args: Any) -> Any:
    raise kind(*args)
