"""Handlers that wait for each other in a circle, importable by name at each worker."""

from __future__ import annotations

import zrpc


async def holds_up_its_loop() -> int:
    return zrpc.rpc_sync("worker1", calls_a_coroutine)


def calls_a_coroutine() -> int:
    return zrpc.rpc_sync("worker0", coroutine)


async def coroutine() -> int:
    return 1
