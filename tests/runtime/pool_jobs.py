"""Jobs of a handler pool that wait until the test lets them go on."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.waiting import SOON
from zrpc.runtime.thread_pool import HandlerPool

# A function that makes a pool of a size.
MakePool = Any


class Jobs:
    """Jobs that wait until `go` is set, in a way that the pool can't see."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.threads = set()

    def __call__(self) -> None:
        self.threads.add(threading.current_thread())
        self.begun.release()
        assert self.go.wait(SOON)
        self.ended.release()

    def fill(self, pool: HandlerPool, running: int, queued: int = 0) -> None:
        """Submits this many jobs; those that may run have begun afterwards."""
        for _ in range(running + queued):
            pool.submit(self)
        for _ in range(running):
            assert self.begun.acquire(timeout=SOON)

    def await_ended(self, count: int) -> None:
        for _ in range(count):
            assert self.ended.acquire(timeout=SOON)


def done(pool: HandlerPool) -> None:
    """Submits a job and waits for it."""
    event = threading.Event()
    pool.submit(event.set)
    assert event.wait(SOON)


def closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def admitted(pool: HandlerPool) -> int:
    """Admits the current thread as a guest; returns its ident."""
    assert pool.admit(threading.get_ident())
    return threading.get_ident()
