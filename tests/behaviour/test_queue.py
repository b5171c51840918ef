"""Queues between workers: what puts and takes see, and what becomes of items on their way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import zrpc as rpc
from tests.support.observed import busy, deferred, stats_of
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh, faults


@pytest.fixture
def items(shared: Mesh) -> Iterator[Any]:
    """A queue on worker1."""
    rref = rpc.remote(1, rpc.Queue)
    yield rref
    rref.rpc_sync().close()
    until(lambda: not busy(shared))


# -- puts and takes --------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [0, 1])
def test_items_leave_in_the_order_in_which_they_came(shared: Mesh, owner: int) -> None:
    rref = rpc.remote(owner, rpc.Queue)
    for item in (0, None, 2, 3):
        assert rref.rpc_sync().put(item) is None
    assert rref.rpc_sync().get() == 0
    assert rref.rpc_sync().get_batch(2) == [None, 2]
    assert rref.rpc_sync().get_batch(32) == [3]
    # Large items do not let small ones overtake them.
    given = [torch.full((1 << 17 if n % 10 == 0 else 1,), float(n)) for n in range(100)]
    rpc.wait_all([rref.rpc_async().put({"x": each}) for each in given])
    taken = rref.rpc_sync().get_batch(100)
    assert all(torch.equal(each["x"], put) for each, put in zip(taken, given, strict=True))


def test_a_queue_that_is_stopped(items: Any, shared: Mesh) -> None:
    rref = rpc.remote(1, rpc.Queue)
    waiting, future = items.rpc_async().get(), rref.rpc_async().get()
    until(lambda: busy(shared) == 2)
    rref.stop()
    with pytest.raises(rpc.QueueClosed) as info:
        future.wait()
    assert info.value.executed is False
    with pytest.raises(rpc.RpcError, match="the actor Queue on worker1 was stopped"):
        rref.rpc_sync().put(1)
    items.rpc_sync().put("other")  # in another queue
    assert waiting.wait() == "other"


def test_a_get_waits_for_an_item_and_takes_no_thread(items: Any, shared: Mesh) -> None:
    futures = [items.rpc_async().get() for _ in range(40)]
    batch = items.rpc_async().get_batch(3)
    until(lambda: busy(shared) == 41)
    until(lambda: stats_of(shared, 1).threads.running <= 1)
    for number in range(41):
        items.rpc_sync().put(number)
    taken = [future.wait() for future in futures] + batch.wait()
    assert sorted(taken) == list(range(41))


def test_a_queue_bounded_by_bytes(shared: Mesh) -> None:
    rref = rpc.remote(1, rpc.Queue, kwargs={"maxbytes": 10_000})
    rref.rpc_sync().put(torch.zeros(10_000))  # larger than the bound, but the queue is empty
    with pytest.raises(queue.Full):
        rref.rpc_sync().put_nowait("")
    rref.rpc_sync().get()
    rref.rpc_sync().put_nowait([torch.zeros(2000)])
    rref.rpc_sync().put_nowait(b"x" * 1000)
    assert rref.rpc_sync().qsize() == 2


def test_a_queue_bounded_by_items_lets_puts_wait(shared: Mesh) -> None:
    rref = rpc.remote(1, rpc.Queue, (2,))
    futures = [rref.rpc_async().put(number) for number in range(4)]
    until(lambda: rref.rpc_sync().full())
    for put in (rref.rpc_sync().put_nowait, partial(rref.rpc_sync().put, timeout=0.01)):
        with pytest.raises(queue.Full):
            put("more")
    assert sorted(rref.rpc_sync().get() for _ in range(4)) == [0, 1, 2, 3]
    rpc.wait_all(futures)


@dataclass
class Box:
    content: Any


@dataclass(slots=True)
class Sample:
    x: Any


class Failed(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return Failed, self.args


def in_objects(values: torch.Tensor) -> np.ndarray[Any, Any]:
    found = np.empty(2, dtype=object)
    found[0] = values
    return found


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attribute": Box,
    "slots": Sample,
    "deque": lambda values: deque([values]),
    "partial": lambda values: partial(echo, values),
    "exception": ValueError,
    "exception that reduces itself": Failed,
    "objects in an array": in_objects,
    "attribute of a tensor": lambda values: with_attribute(torch.zeros(1), values),
}


def with_attribute(holder: Any, values: Any) -> Any:
    holder.values = values
    return holder


@pytest.mark.parametrize("holder", HOLDERS)
def test_bytes_and_gradients_count_in_whatever_holds_a_tensor(shared: Mesh, holder: str) -> None:
    hold = HOLDERS[holder]
    rref = rpc.remote(1, rpc.Queue, kwargs={"maxbytes": 10_000})
    rref.rpc_sync().put_nowait(hold(torch.ones(2000)))
    with pytest.raises(queue.Full):
        rref.rpc_sync().put_nowait(hold(torch.ones(1000)))
    rref.rpc_sync().get()
    if "array" in holder:
        return  # which carries no gradients
    with rpc.autograd.context(), pytest.raises(rpc.RpcError, match="a queue carries no gradients"):
        rref.rpc_sync().put(hold(torch.ones(2, requires_grad=True) * 2))


def test_buffers_count_and_a_tensor_counts_once() -> None:
    own = rpc.Queue[Any](maxbytes=10_000)
    for item in (array("d", [0.0]) * 1000, bytearray(8000), memoryview(bytes(8000)), 1 << 64_000):
        own.put_nowait(item)
        with pytest.raises(queue.Full):
            own.put_nowait(b"x" * 3000)
        own.get()
    whole = torch.ones(1000)
    own.put_nowait([whole, whole, whole.view(10, 100), *whole.split(500)])
    own.put_nowait(b"x" * 4000)
    own.get_batch(2)
    rows = torch.ones(1000, 2000)
    for row in rows[:2]:  # of each item as much as it has of the storage
        own.put_nowait(row[:1000])
    assert own.qsize() == 2


EMPTY: list[Callable[[Any], Any]] = [
    lambda items: items.rpc_sync().get_nowait(),
    lambda items: items.rpc_sync().get(timeout=0.01),
    lambda items: items.rpc_sync().get_batch(2, timeout=0.01),
]
WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda items: items.rpc_sync().get_batch(0), rpc.OptionError, "a batch of 1 or more items"),
    (lambda items: items.rpc_sync().get_batch("2"), rpc.OptionError, "a batch of 1 or more items"),
    (lambda items: items.rpc_sync().get(timeout=-1), rpc.OptionError, "expected a timeout"),
    (lambda items: items.rpc_sync().get(timeout="1"), rpc.OptionError, "expected a timeout"),
    (lambda items: items.rpc_sync().get(True), rpc.OptionError, "there is no argument `block`"),
    (lambda items: items.rpc_sync().put(1, False), rpc.OptionError, "no argument `block`"),
    (lambda items: items.rpc_sync().get(1, 2, 3), TypeError, "get"),
    (lambda items: items.remote().get().to_here(), rpc.RpcError, r"can't be taken by remote\(\)"),
    # There is no item, and it must not wait for one.
    (lambda items: list(items.rpc_stream().get()), TypeError, r"rpc_stream, found Queue\.get"),
    (lambda _: rpc.rpc_sync(1, echo, (rpc.Queue(),)), rpc.RpcError, "a Queue can't be sent"),
    (lambda _: rpc.Queue(-1), rpc.OptionError, "expected bounds of 0"),
    (lambda _: rpc.Queue("a"), rpc.OptionError, "expected bounds of 0"),  # type: ignore[arg-type]
]


def test_errors_of_single_calls(items: Any, caplog: pytest.LogCaptureFixture) -> None:
    for get in EMPTY:
        with pytest.raises(queue.Empty):
            get(items)
    assert not caplog.records  # an empty queue is nothing to log
    for call, kind, text in WRONG:
        with pytest.raises(kind, match=text):
            call(items)
    items.rpc_sync().put("still there")
    assert items.rpc_sync().get() == "still there"


def test_a_short_timeout_ends_before_a_longer_one_that_began_first(items: Any) -> None:
    first, short = [items.rpc_async().get(timeout=each) for each in (60, 0.05)]
    with pytest.raises(queue.Empty):
        short.wait()
    assert not first.done()
    items.rpc_sync().put("first")
    assert first.wait() == "first"


def test_items_that_can_not_be_sent_or_read_leave_the_queue_usable(items: Any) -> None:
    with pytest.raises(rpc.SerializationError):
        items.rpc_sync().put(threading.Lock())
    local = rpc.RRef(rpc.Queue[Any]())
    for item in (threading.Lock(), "first", threading.Lock(), "last"):
        local.local_value().put(item)
    with pytest.raises(rpc.SerializationError):
        local.rpc_sync().get()
    with pytest.raises(rpc.SerializationError):
        local.rpc_sync().get_batch(3)
    assert local.rpc_sync().get_batch(3) == ["first", "last"]
    local.rpc_sync().close()
    with pytest.raises(rpc.QueueClosed):  # though the bad ones will never be taken
        local.rpc_sync(timeout=SOON).get()


def test_closing(shared: Mesh) -> None:
    rref = rpc.remote(1, rpc.Queue, (1,))
    rref.rpc_sync().put("left")
    waits = rref.rpc_async().put("waits")
    until(lambda: busy(shared) == 1)
    rref.rpc_sync().close()
    for put in (waits.wait, partial(rref.rpc_sync().put, "late")):
        with pytest.raises(rpc.QueueClosed, match="takes no more items"):
            put()
    assert rref.rpc_sync().get() == "left"
    for _ in range(2):
        with pytest.raises(rpc.QueueClosed, match="all its items are taken"):
            rref.rpc_sync().get()
        rref.rpc_sync().close()
    other = rpc.remote(1, rpc.Queue)
    future = other.rpc_async().get()
    until(lambda: busy(shared) == 1)
    other.rpc_sync().close()
    with pytest.raises(rpc.QueueClosed):
        future.wait()


@pytest.mark.zrpc(workers=3, faults=True)
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_get_after_closing_waits_until_it_is_known_who_has_the_last_item(
    caller: Mesh, comes_back: bool
) -> None:
    rref = rpc.remote(1, rpc.Queue, name="queue")
    first = rref.rpc_async().get()
    until(lambda: deferred(caller) == 1)  # calls of several workers have no order
    with faults.cut(caller, 0, 1):
        caller.run(2, put_and_close, "item")
        second = caller.submit(2, get_by_name)
        until(lambda: busy(caller) == 1)  # the second one waits
        if comes_back:
            assert first.cancel()
    if comes_back:
        assert second.result(SOON) == "item"
    else:
        assert first.wait() == "item"
        with pytest.raises(rpc.QueueClosed):
            second.result(SOON)
    with pytest.raises(rpc.QueueClosed):
        rref.rpc_sync().get()


def put_and_close(item: Any) -> None:
    named = rpc.get_actor("queue")
    named.rpc_sync().put(item)
    named.rpc_sync().close()
    with pytest.raises(queue.Empty):
        named.rpc_sync().get_nowait()


def get_by_name() -> Any:
    return rpc.get_actor("queue").rpc_sync().get()


def test_tensors_with_gradients_are_refused_in_a_context(items: Any) -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    with rpc.autograd.context():
        with pytest.raises(rpc.RpcError, match=r"a queue carries no gradients, so put tensor\."):
            items.rpc_sync().put([tensor])
        items.rpc_sync().put(tensor.detach())
    items.rpc_sync().put(tensor)  # outside, gradients are not carried by any call
    assert [each.tolist() for each in items.rpc_sync().get_batch(2)] == [[2, 2]] * 2


# -- calls that leave ------------------------------------------------------------------------


def test_a_get_that_is_cancelled_or_times_out_takes_no_item(items: Any, shared: Mesh) -> None:
    future, other = items.rpc_async().get(), items.rpc_async().get()
    until(lambda: busy(shared) == 2)
    assert future.cancel()
    until(lambda: busy(shared) == 1)
    items.rpc_sync().put("item")
    assert other.wait() == "item"
    with pytest.raises(rpc.RpcTimeoutError):
        items.rpc_sync(timeout=0.05).get()
    items.rpc_sync().put("next")
    assert items.rpc_sync().get() == "next"


def test_a_task_that_is_cancelled_before_it_goes_on_takes_no_item(items: Any) -> None:
    async def work() -> None:
        future = items.rpc_async().get()
        task = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        items.rpc_sync().put("item")
        until(future.done)  # the loop has not looked at it yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert items.rpc_sync(timeout=SOON).get() == "item"
    assert items.rpc_sync().empty()


def test_an_await_outside_of_asyncio_leaves_the_future_as_it_was(items: Any) -> None:
    taken = items.rpc_async().get()
    with pytest.raises(RuntimeError, match="no running event loop"):
        taken.__await__().send(None)
    items.rpc_sync().put("item")
    assert taken.wait() == "item"
    items.rpc_sync().close()
    with pytest.raises(rpc.QueueClosed):  # it does not wait for the item to come back
        items.rpc_sync(timeout=SOON).get()


def test_ctrl_c_just_before_an_item_comes_leaves_it_in_the_queue(items: Any, shared: Mesh) -> None:
    def interrupt() -> None:
        while not busy(shared):  # the thread that calls receives for some milliseconds
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        items.rpc_sync().put("item")

    for _ in range(30):
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                items.rpc_sync(timeout=SOON).get()
        finally:
            thread.join()
        assert items.rpc_sync(timeout=SOON).get() == "item"


def test_a_cancelled_put_puts_nothing_and_lets_others_pass(shared: Mesh) -> None:
    rref = rpc.remote(1, rpc.Queue, kwargs={"maxbytes": 10_000})
    rref.rpc_sync().put("first")
    large = rref.rpc_async().put(torch.zeros(10_000))
    until(lambda: busy(shared) == 1)
    small = rref.rpc_async().put("small")
    until(lambda: busy(shared) == 2)
    assert large.cancel()
    small.wait()
    assert rref.rpc_sync().get_batch(9) == ["first", "small"]


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("batch", [False, True])
def test_no_item_is_lost_or_doubled_while_calls_are_cancelled_or_time_out(
    shared: Mesh, owner: int, batch: bool
) -> None:
    """The answer may be on its way at that moment."""
    rref, count = rpc.remote(owner, rpc.Queue), 150
    taken: list[int] = []
    for number in range(count):
        take = rref.rpc_async(timeout=0.002 if number % 5 == 0 else SOON)
        future = take.get_batch(2) if batch else take.get()
        put = rref.rpc_async().put(number)
        if number % 3 == 0:
            put.wait()
        if number % 5 == 0 or not future.cancel():
            with contextlib.suppress(rpc.RpcTimeoutError):
                taken += future.wait() if batch else [future.wait()]
        put.wait()
    while len(taken) < count:  # what was on its way comes back
        taken.append(rref.rpc_sync(timeout=SOON).get())
    assert sorted(taken) == list(range(count))
    assert rref.rpc_sync().empty()


@pytest.mark.zrpc(workers=3)
def test_items_outlive_their_producer_and_a_dead_worker_neither_takes_nor_puts(
    caller: Mesh,
) -> None:
    rref, full = rpc.remote(1, rpc.Queue), rpc.remote(1, rpc.Queue, (1,))
    full.rpc_sync().put("first")
    assert rpc.rpc_sync(2, put_from_there, (rref, "outlives")) is None
    assert rpc.rpc_sync(2, get_from_there, (rref,)) == "outlives"
    until(lambda: busy(caller) == 0)  # the first get has left, so the next is the one that waits
    rpc.rpc_async(2, get_from_there, (rref,))
    rpc.rpc_async(2, put_from_there, (full, "never"))
    until(lambda: busy(caller) == 2)
    caller.agent(2).shutdown(graceful=False)
    until(lambda: busy(caller) == 0)
    rref.rpc_sync().put("other")
    assert rref.rpc_sync(timeout=SOON).get() == "other"
    assert full.rpc_sync().get() == "first"
    assert [rref.rpc_sync().empty(), full.rpc_sync().empty()] == [True, True]


def put_from_there(rref: Any, item: Any) -> None:
    rref.rpc_sync().put(item)


def get_from_there(rref: Any) -> Any:
    return rref.rpc_sync().get()


# -- the end ---------------------------------------------------------------------------------


def test_a_get_ends_once_all_workers_have_called_shutdown(caller: Mesh) -> None:
    future = rpc.remote(1, rpc.Queue).rpc_async(timeout=0).get()
    until(lambda: busy(caller) == 1)
    caller.shutdown()
    with pytest.raises(rpc.QueueClosed, match="all have called shutdown"):
        future.wait()


@pytest.mark.zrpc(elastic=True)
def test_the_owner_of_a_queue_leaves_an_elastic_mesh_although_a_get_waits(caller: Mesh) -> None:
    future = rpc.remote(1, rpc.Queue).rpc_async(timeout=0).get()
    until(lambda: busy(caller) == 1)
    caller.agent(1).shutdown(timeout=SOON)
    with pytest.raises((rpc.QueueClosed, rpc.WorkerDied)):
        future.wait()
