"""Handlers that answer by a future."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

import zrpc as rpc
from tests.support.targets import echo
from zrpc.functions import async_execution


@async_execution
def already_done(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class Later:
    """async_execution on methods of every kind."""

    def __init__(self, n: int) -> None:
        self.n = n

    @async_execution
    def method(self, to: int, x: int) -> Any:
        return rpc.rpc_async(to, echo, (x,)).then(lambda f: f.wait() + self.n)

    @staticmethod
    @async_execution
    def static(to: int, x: int) -> Any:
        return rpc.rpc_async(to, echo, (x,)).then(lambda f: f.wait() + 1)

    @classmethod
    @async_execution
    def of_class(cls, to: int, x: int) -> Any:
        return rpc.rpc_async(to, echo, (x,)).then(lambda f: (cls.__name__, f.wait()))

    @async_execution
    def __call__(self, x: int) -> Any:
        return rpc.rpc_async(0, echo, (x,)).then(lambda f: f.wait() * self.n)

    @async_execution
    def no_future(self) -> int:
        return 5

    async def coroutine(self, x: int) -> int:
        await asyncio.sleep(0)
        return self.n + x
