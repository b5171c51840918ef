"""The current call of a handler: what it reports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import zrpc as rpc
from tests.support.targets import echo
from zrpc.functions import async_execution
from zrpc.testing import Mesh


def test_there_is_none_outside_of_a_handler(shared: Mesh) -> None:
    with pytest.raises(rpc.RpcError, match="there is no current call"):
        rpc.current_call()


def describe() -> tuple[Any, ...]:
    call = rpc.current_call()
    return call.caller, call.cancelled, call.time_remaining(), repr(call)


async def describe_async() -> tuple[Any, ...]:
    await asyncio.sleep(0)
    return describe()


@async_execution
def describe_later() -> Any:
    return rpc.rpc_async(0, echo).then(lambda _: describe())


def test_what_it_reports(shared: Mesh) -> None:
    for function in (describe, describe_async, describe_later):
        for timeout in (0, 5):
            caller, cancelled, remaining, text = rpc.rpc_sync(1, function, timeout=timeout)
            assert caller == rpc.get_worker_info(0)
            assert not cancelled
            assert remaining is None if not timeout else 0 < remaining <= timeout
            assert text == f"<Call from {caller}, waited for>"


def test_a_handler_in_a_handlers_thread_has_its_own(shared: Mesh) -> None:
    """A worker that calls itself."""
    assert rpc.rpc_sync(1, describe_both)


def describe_both() -> bool:
    outer = rpc.current_call()
    inner = rpc.rpc_sync(1, describe)
    return (outer.caller.id, inner[0].id) == (0, 1) and rpc.current_call().caller == outer.caller
