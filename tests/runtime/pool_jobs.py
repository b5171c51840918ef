"""Jobs of a handler pool that wait until the test lets them go on."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from tests.support import waiting
from zrpc.runtime.thread_pool import HandlerPool

SOON = 5.0

until = partial(waiting.until, within=SOON)

# A function that makes a pool of a size. The events in its list `gates` are set after the test.
MakePool = Any


class Jobs:
    """Jobs that wait until `go` is set, in a way that the pool can't see."""

    def __init__(self, make_pool: MakePool) -> None:
        self.go = threading.Event()
        make_pool.gates.append(self.go)
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.threads = set()

    def __call__(self) -> None:
        self.threads.add(threading.current_thread())
        self.begun.release()
        assert self.go.wait(SOON)
        self.ended.release()

    def await_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=SOON)

    def await_ended(self, count: int) -> None:
        for _ in range(count):
            assert self.ended.acquire(timeout=SOON)


def done(pool: HandlerPool) -> None:
    """Submits a job and waits for it."""
    event = threading.Event()
    pool.submit(event.set)
    assert event.wait(SOON)


def admitted(pool: HandlerPool) -> int:
    """Admits the current thread as a guest; returns its ident."""
    assert pool.admit(threading.get_ident())
    return threading.get_ident()
