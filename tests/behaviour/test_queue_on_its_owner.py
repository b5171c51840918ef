"""What the worker on which a queue is does with it, by itself and in handlers."""

from __future__ import annotations

import contextlib
import queue
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import zrpc as rpc
from tests.support.observed import busy
from tests.support.steps import at_step, count_steps, interrupt
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh


def test_without_a_mesh_it_works_within_a_process() -> None:
    own: rpc.Queue[str] = rpc.Queue(1)
    with ThreadPoolExecutor(2) as pool:
        taking = pool.submit(own.get, timeout=float("inf"))  # longer than any wait
        own.put("item")
        assert taking.result(SOON) == "item"
        own.put("left")
        putting = pool.submit(own.put, "last")
        assert own.get() == "left"
        putting.result(SOON)
    assert (len(own), own.qsize(), own.empty(), own.full()) == (1, 1, False, True)
    own.close()
    assert own.get_batch(5, timeout=1) == ["last"]
    with pytest.raises(rpc.QueueClosed):
        own.get()
    other: rpc.Queue[str] = rpc.Queue()
    for get in (partial(other.get, timeout=0.01), other.get_nowait):
        with pytest.raises(queue.Empty):
            get()


def put_from_there(rref: Any, item: Any) -> None:
    rref.rpc_sync().put(item)


def get_from_there(rref: Any) -> Any:
    return rref.rpc_sync().get()


def test_workers_and_the_owner_share_it(shared: Mesh) -> None:
    own: rpc.Queue[str] = rpc.Queue()
    rref = rpc.RRef(own)
    with ThreadPoolExecutor(1) as executor:
        taking = executor.submit(own.get)
        rpc.rpc_sync(1, put_from_there, (rref, "from there"))
        assert taking.result(SOON) == "from there"
    future = rpc.rpc_async(1, get_from_there, (rref,))
    own.put("from here")
    assert future.wait() == "from here"


@pytest.mark.parametrize("items", [[], ["first"]], ids=["empty", "full"])
def test_a_get_that_ctrl_c_interrupts_takes_no_later_item(items: list[str]) -> None:
    """Afterwards nobody waits in the line who would take it."""

    def filled() -> rpc.Queue[str]:
        own: rpc.Queue[str] = rpc.Queue()
        for item in items:
            own.put(item)
        return own

    def take(own: rpc.Queue[str]) -> None:
        with contextlib.suppress(queue.Empty):
            own.get(timeout=0.001)

    for step in range(1, count_steps(lambda: take(filled())) + 1):
        own = filled()
        with contextlib.suppress(KeyboardInterrupt), at_step(step, interrupt) as steps:
            take(own)
        own.put("later")
        assert own.get_batch(2)[-1] == "later", steps.place
        own.close()
        with pytest.raises(rpc.QueueClosed):  # no item may come back
            own.get_nowait()


class Item:
    """What a test follows."""


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("waits", [False, True])
def test_an_item_is_freed_once_it_is_taken(shared: Mesh, waits: bool) -> None:
    own: rpc.Queue[Item] = rpc.Queue()
    rref, item = rpc.RRef(own), Item()
    gone = weakref.ref(item)
    taking = rpc.rpc_async(1, get_from_there, (rref,)) if waits else None
    until(lambda: busy(shared, 0) == waits)
    own.put(item)
    del item
    found = rpc.rpc_sync(1, get_from_there, (rref,)) if taking is None else taking.wait()
    assert type(found) is Item
    until(lambda: gone() is None)


def test_a_handler_that_waits_on_the_owner_is_cancelled(shared: Mesh) -> None:
    rref = rpc.remote(1, rpc.Queue)
    future = rpc.rpc_async(1, get_on_owner, (rref,))
    until(lambda: busy(shared) == 1)
    assert future.cancel()
    until(lambda: not busy(shared))
    rref.rpc_sync().put("item")
    assert rpc.rpc_sync(1, get_on_owner, (rref,)) == "item"


def get_on_owner(rref: Any) -> Any:
    return rref.local_value().get()


async def get_in_coroutine(rref: Any) -> Any:
    return get_on_owner(rref)


async def await_item(rref: Any) -> Any:
    return await rref.rpc_async().get()


def test_a_coroutine_uses_the_rref(shared: Mesh) -> None:
    rref = rpc.remote(1, rpc.Queue)
    with pytest.raises(rpc.RpcError, match=r"await queue\.rpc_async\(\)\.get\(\)"):
        rpc.rpc_sync(1, get_in_coroutine, (rref,))
    future = rpc.rpc_async(1, await_item, (rref,))
    rref.rpc_sync().put("item")
    assert future.wait() == "item"
