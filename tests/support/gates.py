"""A handler that waits until the test lets it go on."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.support.identity import Same
from tests.support.waiting import SOON


class Gate(Same):
    """A handler that waits: the test sees it enter, and lets it go on. In meshes of threads."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def wait_inside(self, result: Any = None) -> Any:
        """Is called remotely; returns the result once the gate is open."""
        self.entered.release()
        assert self.opened.wait(SOON), "nobody has opened the gate"
        return result

    def work_inside(self, result: Any = None) -> Any:
        """Does the same, and uses some processor time: nobody takes its thread for waiting."""
        self.entered.release()
        deadline = time.monotonic() + SOON
        while not self.opened.wait(0.001):
            assert time.monotonic() < deadline, "nobody has opened the gate"
        return result

    def await_entry(self, count: int = 1) -> None:
        """Waits until this many handlers are inside."""
        for _ in range(count):
            assert self.entered.acquire(timeout=SOON), "nobody has come to the gate"

    def open(self) -> None:
        self.opened.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()
