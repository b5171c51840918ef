"""The items of a stream: which, in which order, how far ahead; what is refused; and actors."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd
from tests.services.streams.conftest import Tap, read_by_threads
from tests.support.gates import Gate
from tests.support.identity import Same
from tests.support.waiting import SOON
from zrpc.testing import Mesh


def count(n: int) -> Iterator[int]:
    yield from range(n)


class Model:
    def __init__(self, word: str = "token") -> None:
        self.word = word

    def generate(self, n: int, *, suffix: str = "") -> Iterator[str]:
        for number in range(n):
            yield f"{self.word}{number}{suffix}"

    def __call__(self, n: int) -> Iterator[int]:
        return count(n)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_all_items_come_in_order(caller: Mesh, to: str) -> None:
    for prefetch in (1, 2, 3, 256, 2**70):
        stream = zrpc.rpc_stream(to, count, args=(500,), prefetch=prefetch)
        assert list(stream) == list(range(500))
        assert list(stream) == []
    with zrpc.rpc_stream(to, count, args=(5,)) as stream:
        assert next(stream) == 0
        assert next(stream) == 1
        assert list(stream) == [2, 3, 4]
    with pytest.raises(StopIteration):
        next(stream)


def test_a_method_of_a_value_can_be_a_generator(caller: Mesh) -> None:
    gate = threading.Event()

    class Slow(Same):
        def make(self) -> Model:
            assert gate.wait(SOON)
            return Model()

    stream = zrpc.remote("worker1", Slow().make).rpc_stream().generate(2)  # it waits for the value
    model = zrpc.remote("worker1", Model, args=("word",))
    assert list(model.rpc_stream().generate(3, suffix="!")) == ["word0!", "word1!", "word2!"]
    assert list(model.rpc_stream(prefetch=1)(3)) == [0, 1, 2]
    here = zrpc.RRef(Model())
    assert list(here.rpc_stream().generate(1)) == ["token0"]
    gate.set()
    assert list(stream) == ["token0", "token1"]


def shared_list(n: int) -> Iterator[Any]:
    found: list[int] = []
    tensor = torch.zeros(3)
    large = torch.zeros(1 << 17)
    for number in range(n):
        found.append(number)
        tensor.fill_(number)
        large.fill_(number)
        yield found, tensor, large if number % 2 else None


def test_an_item_is_what_it_was_when_it_was_yielded(caller: Mesh) -> None:
    stream = zrpc.rpc_stream("worker1", shared_list, args=(20,))
    for number, (found, tensor, large) in enumerate(stream):
        assert found == list(range(number + 1))
        assert tensor.tolist() == [number] * 3
        assert large is None or bool((large == number).all())


def test_the_generator_is_at_most_so_far_ahead(caller: Mesh) -> None:
    for prefetch in (1, 2, 7):
        tap = Tap()
        with zrpc.rpc_stream("worker1", tap.run, prefetch=prefetch) as stream:
            for taken in range(1, 20):
                assert next(stream) == taken - 1
                assert tap.made <= taken + prefetch
            tap.await_made(19 + prefetch // 2)
        tap.await_close()


@pytest.mark.zrpc(workers=2, options={"max_bytes_in_flight": 1 << 20})
def test_the_generator_is_at_most_as_far_ahead_as_flow_control_lets_it(caller: Mesh) -> None:
    for elements in (1 << 17, 1 << 19):  # half a MiB each; and more than the limit
        tap = Tap(lambda number, elements=elements: torch.full((elements,), float(number)))
        with zrpc.rpc_stream("worker1", tap.run) as stream:
            tap.await_made((1 << 18) // elements or 1)
            for number in range(10):
                assert tap.made <= number + 3
                assert next(stream)[0] == number


@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_generators_that_rest_hold_no_thread(caller: Mesh) -> None:
    taps = [Tap() for _ in range(5)]
    streams = [zrpc.rpc_stream("worker1", tap.run, prefetch=2) for tap in taps]
    for tap in taps:
        tap.await_made(2)
    assert zrpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    for stream in streams:
        assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
        stream.close()


@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_a_generator_that_never_rests_lets_other_handlers_run(caller: Mesh) -> None:
    enough = threading.Event()

    class Endless(Same):
        def run(self) -> Iterator[int]:
            number = 0
            while not enough.is_set():
                yield number
                number += 1

    stream = zrpc.rpc_stream("worker1", Endless().run)
    reader = threading.Thread(target=list, args=(stream,))
    reader.start()
    assert zrpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    enough.set()
    reader.join(SOON)
    assert not reader.is_alive()


def test_a_reader_that_never_waits_lets_other_tasks_of_its_loop_run(caller: Mesh) -> None:
    async def main() -> int:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(take_turns())
        await asyncio.sleep(0)
        async for _ in stream:
            time.sleep(0.001)  # what it does with an item
        task.cancel()
        return turns

    tap = Tap(length=200)
    stream = zrpc.rpc_stream("worker1", tap.run, prefetch=300)
    next(stream)
    tap.await_close()  # all items are there
    assert asyncio.run(main()) > 3


def test_a_task_may_poll_a_stream_now_and_then(caller: Mesh) -> None:
    async def main() -> list[int]:
        found: list[int] = []
        while len(found) < 3:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    found.append(await anext(stream))
            await asyncio.sleep(0.03)  # the loop has many turns
        return found

    with zrpc.rpc_stream("worker1", count, args=(10,)) as stream:
        assert asyncio.run(asyncio.wait_for(main(), SOON)) == [0, 1, 2]


def test_several_threads_share_the_items(caller: Mesh) -> None:
    stream = zrpc.rpc_stream("worker1", count, args=(3000,), prefetch=16)
    assert read_by_threads(stream, 4) == list(range(3000))


def doubled(to: str, n: int) -> Iterator[int]:
    for item in zrpc.rpc_stream(to, count, args=(n,)):
        yield 2 * item


def total(to: str, n: int) -> int:
    return sum(zrpc.rpc_stream(to, doubled, args=("worker0", n)))


@pytest.mark.zrpc(workers=3)
def test_handlers_and_generators_read_streams_of_other_workers(caller: Mesh) -> None:
    assert zrpc.rpc_sync("worker1", total, args=("worker2", 100)) == 9900


@pytest.mark.zrpc(workers=2, options={"max_bytes_in_flight": 1 << 20})
def test_a_stream_that_has_begun_leaves_room_for_calls(caller: Mesh) -> None:
    stream = zrpc.rpc_stream("worker1", pairs, args=(torch.ones(1 << 18),))
    assert next(stream) == 0
    future = zrpc.rpc_async("worker1", len, args=(torch.ones(1 << 18),), timeout=SOON)
    assert future.wait() == 1 << 18
    assert list(stream) == [1]


def pairs(_: torch.Tensor) -> Iterator[int]:
    yield 0
    yield 1


def scaled(weight: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    for factor in range(1, n + 1):
        yield weight * factor


def test_gradients_go_through_a_stream(caller: Mesh) -> None:
    weight = torch.ones(2, requires_grad=True)
    with zrpc.autograd.context() as context:
        loss = sum(item.sum() for item in zrpc.rpc_stream("worker1", scaled, args=(weight, 3)))
        zrpc.autograd.backward(context, [loss])
        gradient = zrpc.autograd.get_gradients(context)[weight]
    assert gradient.tolist() == [6, 6]


# -- what is refused -----------------------------------------------------------------------------


async def ticks(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


async def no_generator() -> int:
    return 1


def test_a_function_that_is_no_generator_is_refused(caller: Mesh) -> None:
    for function in (dict, no_generator):
        with pytest.raises(TypeError, match=f"{function.__qualname__}.*rpc_sync"):
            next(zrpc.rpc_stream("worker1", function))


@pytest.mark.parametrize("function", [count, ticks])
def test_a_generator_is_refused_by_other_verbs(caller: Mesh, function: Any) -> None:
    with pytest.raises(zrpc.SerializationError, match="rpc_stream"):
        zrpc.rpc_sync("worker1", function, args=(1,))
    for owner in ("worker0", "worker1"):
        rref = zrpc.remote(owner, function, args=(1,))
        with pytest.raises(zrpc.SerializationError, match=f"{function.__name__}.*rpc_stream"):
            rref.to_here()
        with pytest.raises(zrpc.SerializationError, match="rpc_stream"):
            rref.rpc_sync().send(None)


def test_a_stream_can_not_be_sent(caller: Mesh) -> None:
    with zrpc.rpc_stream("worker1", count, args=(1,)) as stream:
        with pytest.raises(zrpc.RpcError, match=r"Stream\(count on worker1\) can't be sent"):
            zrpc.rpc_sync("worker1", list, args=(stream,))
        assert next(stream) == 0


def test_a_wrong_prefetch_is_refused(caller: Mesh) -> None:
    wrong: list[Any] = [0, -1, 1.5]
    for prefetch in wrong:
        with pytest.raises(zrpc.OptionError, match="prefetch"):
            zrpc.rpc_stream("worker1", count, args=(1,), prefetch=prefetch)


def test_a_wrong_deadline_is_called_by_its_name(caller: Mesh) -> None:
    model = zrpc.remote(1, Model)
    group = zrpc.group([model])
    opens: list[Callable[[Any], Any]] = [
        lambda deadline: zrpc.rpc_stream(1, count, args=(1,), deadline=deadline),
        lambda deadline: zrpc.rpc_stream(zrpc.group("*"), count, args=(1,), deadline=deadline),
        lambda deadline: model.rpc_stream(deadline=deadline).generate(1),
        lambda deadline: group.rpc_stream(deadline=deadline).generate(1),
    ]
    for open_stream in opens:
        with pytest.raises(TypeError, match=r"deadline must be a number of seconds, .* '5'"):
            open_stream("5")
        with pytest.raises(zrpc.OptionError, match="deadline must be a finite number"):
            open_stream(float("nan"))


def test_arguments_that_can_not_be_pickled_are_refused_at_once(caller: Mesh) -> None:
    with pytest.raises(zrpc.SerializationError):
        zrpc.rpc_stream("worker1", count, args=(threading.Lock(),))


# -- streams of actors, whose places they hold -----------------------------------------------------


@zrpc.actor
class Counting:
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
        model = zrpc.remote("worker1", Counting)
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
    model = zrpc.remote("worker1", Counting)
    streams = [model.rpc_stream().generate(3) for _ in range(5)]
    counted = model.rpc_async().count_open()
    assert [list(stream) for stream in streams] == [[0, 1, 2]] * 5
    assert counted.wait() == 0


def test_a_stream_that_waits_is_refused_when_its_actor_is_stopped(caller: Mesh) -> None:
    model = zrpc.remote("worker1", Counting)
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
    model = zrpc.remote("worker1", Counting)
    with model.rpc_stream(prefetch=2).generate(10) as stream:
        assert next(stream) == 0
        with pytest.raises(zrpc.RpcError, match=r"generate.* The actor is stopped") as caught:
            model.stop()
        assert caught.value.executed is None
        with pytest.raises(zrpc.RpcError, match="was stopped"):
            model.rpc_sync().count_open()
        assert list(stream) == list(range(1, 10))
    model.stop()  # ends after the stop before
