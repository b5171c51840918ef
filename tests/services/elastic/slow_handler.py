"""A handler that runs until the test lets it end."""

from __future__ import annotations

import threading

PATIENCE = 20.0
entered = threading.Event()
finish = threading.Event()


def slow() -> str:
    entered.set()
    finish.wait(PATIENCE)
    return "done"
