"""Handlers that tell how they ended."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.waiting import SOON


class Watched(Gate):
    """A handler that tells how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.stays = False  # when it is cancelled, so that the answer comes too late
        self.ended = threading.Semaphore(0)

    def tell(self, what: Any) -> None:
        self.told.append(what)
        self.ended.release()

    def watch(self) -> None:
        """Runs until it is cancelled."""
        self.entered.release()
        self.tell(rpc.current_call().wait_cancelled(SOON))
        if self.stays:
            assert self.opened.wait(SOON)

    async def sleep(self) -> None:
        self.entered.release()
        try:
            await asyncio.sleep(SOON)
        except asyncio.CancelledError:
            self.tell("cancelled")
            raise
        self.tell("slept")

    def await_end(self, count: int = 1) -> list[Any]:
        for _ in range(count):
            assert self.ended.acquire(timeout=SOON), "the handler did not end"
        return self.told


class Keeper:
    """The value of an RRef."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def watch(self) -> None:
        self.watched.watch()

    async def sleep(self) -> None:
        await self.watched.sleep()


async def wait_for(future: Any) -> Any:
    return await future


def call_until_it_begins(watched: Watched, function: Any, args: Any = ()) -> None:
    """Has a call time out whose handler has begun: on a slow machine not at the first attempt."""
    watched.stays = True
    for timeout in (0.1, 0.5, 2.5, 12.5):
        with pytest.raises(rpc.RpcTimeoutError):
            rpc.rpc_sync(1, function, args, timeout=timeout)
        if watched.entered.acquire(timeout=0):
            return
    pytest.fail("the handler never began")
