"""Handlers that wait, importable by name at each worker of a mesh of threads."""

from __future__ import annotations

from typing import Any

import zrpc
from tests.support.gates import Gate
from tests.support.waiting import SOON
from zrpc.functions import async_execution

door = Gate()


def knock() -> str:
    door.entered.release()
    assert door.opened.wait(SOON), "nobody has opened the door"
    return "in"


def knock_at(worker: str) -> Any:
    return zrpc.rpc_sync(worker, knock)


async def knock_and_await(worker: str) -> Any:
    return await zrpc.rpc_async(worker, knock)


@async_execution
def knock_and_return(worker: str) -> Any:
    return zrpc.rpc_async(worker, knock)
