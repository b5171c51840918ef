"""Streams of workers that die or shut down."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import zrpc
from tests.services.streams.conftest import Tap
from tests.services.streams.test_ends import fails_after
from tests.services.streams.test_items import count
from tests.support.gates import Gate
from tests.support.identity import here
from tests.support.observed import ask_often, calls_to
from tests.support.waiting import SOON, until
from zrpc.agent.shutdown import ShutdownTiming
from zrpc.testing import Mesh, faults, local_mesh


def test_a_shutdown_waits_for_no_stream_that_has_ended() -> None:
    with local_mesh(2) as mesh:
        for rank in range(2):
            mesh.agent(rank).graceful_shutdown.timing = ShutdownTiming(services=math.inf)
        with mesh.agent(0).as_current():
            stream = zrpc.rpc_stream("worker1", fails_after, args=(0, KeyError("late")))
        with pytest.raises(KeyError, match="late"):
            next(stream)
        mesh.shutdown()


@pytest.mark.zrpc(workers=3)
def test_the_death_of_the_producer_comes_after_its_items(caller: Mesh) -> None:
    tap = Tap()
    stream = zrpc.rpc_stream("worker1", tap.run, prefetch=4)
    tap.await_made(4)
    assert next(stream) == 0
    caller.agent(1).close()
    with pytest.raises(zrpc.WorkerDied, match="worker1"):
        list(stream)
    with pytest.raises(zrpc.WorkerDied):
        list(zrpc.rpc_stream("worker1", count, args=(1,)))
    assert list(zrpc.rpc_stream("worker2", count, args=(3,))) == [0, 1, 2]


@pytest.mark.system
@pytest.mark.zrpc(workers=2, faults=True)
def test_the_death_of_a_producer_ends_a_stream_that_lacks_an_item(caller: Mesh) -> None:
    ask_often(caller, 1000)  # else a question would reveal the loss first
    with Gate() as item, Gate() as end:

        def run() -> Iterator[int]:
            yield 0
            item.wait_inside()
            yield 1
            end.wait_inside()

        stream = zrpc.rpc_stream("worker1", here(run), prefetch=4, timeout=SOON)
        assert next(stream) == 0
        item.await_entry()
        with faults.drop(caller, 1, 0) as fault:
            item.open()
            until(lambda: fault.happened, "the item is lost")
        end.open()
        until(lambda: not calls_to(caller, 1).calls_in_flight, "the end has come")
        caller.agent(1).close()
        with pytest.raises(zrpc.WorkerDied, match="worker1"):
            next(stream)
    caller.agent(0).close()


@pytest.mark.zrpc(workers=3)
def test_the_generator_is_closed_when_its_reader_dies(caller: Mesh) -> None:
    tap = Tap()
    with caller.agent(2).as_current():
        stream = zrpc.rpc_stream("worker1", tap.run, prefetch=4)
        next(stream)
    caller.agent(2).close()
    tap.await_close()
    with pytest.raises(zrpc.NotInitializedError):
        list(stream)


async def poll(stream: Any) -> None:
    with contextlib.suppress(TimeoutError):
        while True:
            await asyncio.wait_for(anext(stream), 0.05)


@pytest.mark.system
@pytest.mark.parametrize(
    "read", [next, lambda stream: asyncio.run(poll(stream))], ids=["next", "poll"]
)
@pytest.mark.parametrize("workers", ["worker1", "worker*"])
def test_a_stream_that_nobody_reads_ends_as_all_shut_down(
    gate: Gate, workers: str, read: Any
) -> None:
    """Also if its reader has polled: a wait that was cancelled leaves nothing behind."""

    closed = threading.Semaphore(0)

    def run() -> Iterator[int]:
        try:
            yield 0
            gate.wait_inside()
            yield from range(10**9)
        finally:
            closed.release()

    with local_mesh(3) as mesh:
        agent = mesh.agent(0)
        with agent.as_current():
            group = zrpc.group(workers)
            stream = zrpc.rpc_stream(group if "*" in workers else workers, here(run))
            read(stream)
            gate.await_entry(len(group))
        shutdown = threading.Thread(target=mesh.shutdown)
        shutdown.start()
        until(lambda: not agent.caller.calls.in_flight())
        gate.open()
        shutdown.join(SOON)
        assert all(closed.acquire(timeout=SOON) for _ in group)
        with pytest.raises((zrpc.NotInitializedError, zrpc.GroupError), match="nobody reads it"):
            list(stream)


def test_a_handler_may_read_its_stream_while_all_workers_shut_down(caller: Mesh) -> None:
    with local_mesh(3) as mesh:
        gate = Gate()
        tap = Tap(length=12)

        def read() -> list[int]:
            found = []
            for item in zrpc.rpc_stream("worker2", tap.run, prefetch=1):
                gate.entered.release()
                found.append(item)
                time.sleep(0.12)  # together longer than a stream may stay unread
            return found

        with mesh.agent(0).as_current():
            future = zrpc.rpc_async("worker1", here(read))
        gate.await_entry()
        mesh.shutdown()
        assert future.wait() == list(range(12))
