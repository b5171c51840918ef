"""Streams of the methods of actors: each holds its place until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.waiting import SOON
from zrpc.testing import Mesh


@zrpc.actor
class Model:
    def __init__(self) -> None:
        self.open = 0

    def generate(self, n: int) -> Iterator[int]:
        self.open += 1
        try:
            yield from range(n)
        finally:
            self.open -= 1

    async def generate_in_loop(self, n: int) -> AsyncIterator[int]:
        self.open += 1
        try:
            for number in range(n):
                yield number
        finally:
            self.open -= 1

    def count_open(self) -> int:
        return self.open

    @zrpc.concurrent
    def count_beside(self) -> int:
        return self.open


def test_a_stream_holds_its_place_until_it_ends(caller: Mesh) -> None:
    for method in ("generate", "generate_in_loop"):
        model = zrpc.remote("worker1", Model)
        stream = getattr(model.rpc_stream(prefetch=2), method)(10)
        assert next(stream) == 0
        later = model.rpc_async().count_open()
        assert model.rpc_sync().count_beside() == 1
        assert not later.done()
        assert list(stream) == list(range(1, 10))
        assert later.wait() == 0


class Slow:
    """An actor whose stream has a step that waits, and then an end that does."""

    def __init__(self, step: Gate, end: Gate) -> None:
        self.step, self.end, self.over = step, end, False

    def generate(self) -> Iterator[int]:
        try:
            yield 0
            self.step.wait_inside()
        finally:
            self.end.wait_inside()
            self.over = True

    async def generate_in_loop(self) -> AsyncIterator[int]:
        try:
            yield 0
            self.step.entered.release()
            await asyncio.Event().wait()  # until it is cancelled
        finally:
            await asyncio.shield(asyncio.to_thread(self.end.wait_inside))
            self.over = True

    def is_over(self) -> bool:
        return self.over


@pytest.mark.parametrize("method", ["generate", "generate_in_loop"])
def test_a_stream_that_is_left_holds_its_place_until_it_is_closed(
    caller: Mesh, method: str
) -> None:
    with Gate() as step, Gate() as end:
        slow = zrpc.remote("worker1", zrpc.actor(Slow, concurrency=1), (step, end))
        stream = getattr(slow.rpc_stream(), method)()
        assert next(stream) == 0
        step.await_entry()
        stream.close()
        step.open()
        end.await_entry()
        with pytest.raises(zrpc.RpcTimeoutError):  # the mailbox looks after it ten times a second
            slow.rpc_sync(timeout=0.5).is_over()
        end.open()
        assert slow.rpc_sync(timeout=SOON).is_over()


def test_streams_and_calls_of_one_worker_begin_in_their_order(caller: Mesh) -> None:
    model = zrpc.remote("worker1", Model)
    streams = [model.rpc_stream().generate(3) for _ in range(5)]
    counted = model.rpc_async().count_open()
    assert [list(stream) for stream in streams] == [[0, 1, 2]] * 5
    assert counted.wait() == 0


def test_a_stream_that_waits_is_refused_when_its_actor_is_stopped(caller: Mesh) -> None:
    model = zrpc.remote("worker1", Model)
    first = model.rpc_stream(prefetch=2).generate(10)
    assert next(first) == 0
    second = model.rpc_stream().generate(10)
    stopped = zrpc.rpc_async("worker1", model.stop)
    with pytest.raises(zrpc.RpcError, match="was stopped") as caught:
        next(second)
    assert caught.value.executed is False
    assert list(first) == list(range(1, 10))
    stopped.wait()


def test_a_stop_by_the_reader_of_a_stream_no_longer_waits_but_takes_effect(caller: Mesh) -> None:
    model = zrpc.remote("worker1", Model)
    with model.rpc_stream(prefetch=2).generate(10) as stream:
        assert next(stream) == 0
        with pytest.raises(zrpc.RpcError, match=r"generate.* The actor is stopped") as caught:
            model.stop()
        assert caught.value.executed is None
        with pytest.raises(zrpc.RpcError, match="was stopped"):
            model.rpc_sync().count_open()
        assert list(stream) == list(range(1, 10))
    model.stop()  # ends after the stop before
