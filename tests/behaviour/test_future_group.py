"""Waiting for several futures at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.steps import at_step, interrupt
from tests.support.targets import echo, fail
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh


def test_wait_all_returns_the_values_in_order(shared: Mesh, gate: Gate) -> None:
    futures = [rpc.rpc_async(1, gate.wait_inside, ("slow",))]
    futures += [rpc.rpc_async(to, echo, (i,)) for i, to in enumerate([0, 1] * 5)]
    for future in futures[1:]:
        future.wait()
    gate.open()
    assert rpc.wait_all(futures) == ["slow", *range(10)]


def test_the_first_error_ends_the_wait_while_other_calls_go_on(shared: Mesh) -> None:
    for wait in (rpc.wait_all, lambda futures: rpc.collect_all(futures).wait()):
        with Gate() as gate:
            slow = rpc.rpc_async(1, gate.wait_inside, (1,))
            with pytest.raises(KeyError, match="k") as info:
                wait([slow, rpc.rpc_async(1, fail, (KeyError("k"),))])
            assert "worker1" in str(info.value.__cause__)
            assert not slow.done()
            gate.open()
            assert slow.wait() == 1


def test_wait_all_gives_up_after_its_timeout(shared: Mesh, gate: Gate) -> None:
    slow = rpc.rpc_async(1, gate.wait_inside, (1,))
    quick = rpc.rpc_async(1, echo, (2,))
    quick.wait()
    with pytest.raises(rpc.RpcTimeoutError, match=r"done within 0\.05 s, but 1 of them"):
        rpc.wait_all([slow, quick], timeout=0.05)
    gate.open()
    assert rpc.wait_all([slow, quick], timeout=SOON) == [1, 2]


def test_as_completed_gives_each_future_when_it_is_done(shared: Mesh) -> None:
    with Gate() as first, Gate() as second:
        futures = [rpc.rpc_async(1, gate.wait_inside) for gate in (first, second)]
        done = rpc.as_completed(futures)
        second.open()
        assert next(done) is futures[1]
        first.open()
        assert next(done) is futures[0]
        assert list(done) == []


def test_as_completed_gives_failed_and_cancelled_futures_too(shared: Mesh, gate: Gate) -> None:
    waits = rpc.rpc_async(1, gate.wait_inside)
    fails = rpc.rpc_async(1, fail, (KeyError("k"),))
    done = rpc.as_completed([waits, fails], timeout=SOON)
    assert next(done) is fails
    with pytest.raises(KeyError):
        fails.wait()
    waits.cancel()
    assert next(done) is waits
    assert waits.cancelled()


def test_no_futures_are_done_at_once() -> None:
    assert rpc.wait_all([]) == []
    assert rpc.collect_all([]).wait() == []
    assert list(rpc.as_completed([])) == []


def test_one_future_twice_is_done_twice(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (1,))
    assert rpc.wait_all([future, future]) == [1, 1]
    assert rpc.collect_all([future, future]).wait() == [future, future]


def test_torch_futures_may_be_among_them(shared: Mesh) -> None:
    plain: torch.futures.Future[int] = torch.futures.Future()
    both = [rpc.rpc_async(1, echo, (1,)), plain]
    collected = rpc.collect_all(both)
    assert not collected.done()
    threading.Timer(0.01, plain.set_result, (2,)).start()
    assert rpc.wait_all(both, timeout=SOON) == [1, 2]
    assert [f.wait() for f in collected.wait()] == [1, 2]


def test_what_is_no_future_is_refused() -> None:
    for take in (rpc.wait_all, rpc.collect_all, rpc.as_completed):
        with pytest.raises(
            TypeError, match=r"expected torch\.futures\.Future .* int at position 1"
        ):
            take([rpc.Future(), 1])  # type: ignore[list-item]


def test_collect_all_can_be_awaited_and_chained(shared: Mesh) -> None:
    async def main() -> int:
        done = await rpc.collect_all([rpc.rpc_async(1, echo, (i,)) for i in range(5)])
        return sum(future.wait() for future in done)

    assert asyncio.run(main()) == 10


def test_a_cancelled_collection_leaves_its_calls_alone(shared: Mesh, gate: Gate) -> None:
    slow = rpc.rpc_async(1, gate.wait_inside, (1,))
    collected = rpc.collect_all([slow])
    assert collected.cancel()
    gate.open()
    assert slow.wait() == 1
    with pytest.raises(rpc.RpcCancelledError):
        collected.wait()


def test_wait_all_in_a_callback_runs_the_callbacks_that_it_waits_for() -> None:
    start: rpc.Future[int] = rpc.Future()
    seen: list[list[int]] = []

    def waits(done: Any) -> None:
        inner: rpc.Future[int] = rpc.Future()
        seen.append(rpc.wait_all([inner.then(lambda f: f.wait()), nested(inner)], timeout=SOON))

    def nested(inner: rpc.Future[int]) -> rpc.Future[int]:
        result = inner.then(lambda f: f.wait() + 1)
        inner.set_result(1)
        return result

    future: Any = start
    for _ in range(20):  # deeper than callbacks nest
        future = future.then(lambda f: f.wait())
    future.then(waits)
    start.set_result(0)
    assert seen == [[1, 2]]


def test_futures_that_were_waited_for_are_freed_without_the_collector(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, echo, (i,)) for i in range(3)]
    gone = [weakref.ref(future) for future in futures]
    gc.disable()
    try:
        rpc.wait_all(futures)
        del futures
        # The thread that settled a call wakes the one that waits, and then drops the future.
        until(lambda: not any(ref() for ref in gone), "all are freed")
    finally:
        gc.enable()


def test_ctrl_c_leaves_the_other_futures_to_the_next_call() -> None:
    for number in itertools.count(1):
        futures: list[rpc.Future[int]] = [rpc.Future() for _ in range(2)]
        arriving = rpc.as_completed(futures, timeout=5)
        futures[0].set_result(0)
        with at_step(number, interrupt) as steps, contextlib.suppress(KeyboardInterrupt):
            next(arriving)
        if not steps.place:
            break
        futures[1].set_result(1)
        assert futures[1] in list(arriving)
    assert number > 3
