"""What a handler has of its own: its current call, and context variables, which begin unset."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
from typing import Any

import numpy as np
import pytest

import zrpc
import zrpc as rpc
from tests.support.targets import echo
from zrpc.functions import async_execution
from zrpc.testing import Mesh

variable = contextvars.ContextVar("variable", default="unset")


def set_variable() -> str:
    found = variable.get()
    variable.set("of another handler")
    return found


def set_precision() -> int:
    found = decimal.getcontext().prec
    decimal.getcontext().prec = 5  # in place
    return found


def set_error_handling() -> str:
    return np.seterr(over="raise")["over"]


async def set_variable_async() -> str:
    return set_variable()


async def set_precision_async() -> int:
    return set_precision()


def set_variable_in_a_callback() -> zrpc.Future[str]:
    return zrpc.rpc_async("worker0", len, args=("",)).then(lambda _: set_variable())


SETTERS = [
    set_variable,
    set_precision,
    set_error_handling,
    set_variable_async,
    set_precision_async,
    zrpc.functions.async_execution(set_variable_in_a_callback),
]


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_what_a_handler_sets_is_not_seen_by_the_next(caller: Mesh) -> None:
    for setter in SETTERS:
        found = [zrpc.rpc_sync("worker1", setter) for _ in range(20)]
        assert len(set(found)) == 1


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_what_a_method_of_an_rref_sets_is_not_seen_by_the_next(caller: Mesh) -> None:
    class Setter:
        def __init__(self) -> None:
            set_variable()

        set = staticmethod(set_variable)

    rref = zrpc.remote("worker1", Setter)
    assert {rref.rpc_sync().set() for _ in range(20)} == {"unset"}


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_what_a_callback_sets_is_not_seen_by_the_next(caller: Mesh) -> None:
    calls = [zrpc.rpc_async("worker1", len, args=("",)) for _ in range(20)]
    futures = [call.then(lambda _: set_variable()) for call in calls]
    assert {future.wait() for future in futures} == {"unset"}


def test_handlers_see_what_was_set_before_their_worker_started(alone: int) -> None:
    def run() -> list[object]:
        variable.set("before")
        with zrpc.session("me", rank=0, world_size=1):
            variable.set("after")
            return [zrpc.rpc_sync("me", setter) for setter in (set_variable, set_variable_async)]

    assert contextvars.copy_context().run(run) == ["before", "before"]
    with decimal.localcontext() as context:
        context.prec = 50
        with zrpc.session("me", rank=0, world_size=1):
            for setter in (set_precision, set_precision_async):
                assert [zrpc.rpc_sync("me", setter) for _ in range(20)] == [50] * 20
        assert decimal.getcontext().prec == 50


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
