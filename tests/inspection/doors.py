"""Handlers that wait, importable by name at each worker of a mesh of threads."""

from __future__ import annotations

import threading
from typing import Any

import zrpc
from zrpc.functions import async_execution

# Seconds, for every wait; no test comes near it unless something is broken.
PATIENCE = 20.0


class Door:
    """Closed until the test opens it; tells how many have come to it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self.opened = threading.Event()

    def await_visitors(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.came.acquire(timeout=PATIENCE), "nobody has come to the door"


door = Door()


def knock() -> str:
    door.came.release()
    assert door.opened.wait(PATIENCE), "nobody has opened the door"
    return "in"


def knock_at(worker: str) -> Any:
    return zrpc.rpc_sync(worker, knock)


async def knock_and_await(worker: str) -> Any:
    return await zrpc.rpc_async(worker, knock)


@async_execution
def knock_and_return(worker: str) -> Any:
    return zrpc.rpc_async(worker, knock)
