"""Actors that wait for each other: the calls of the circle fail, and the others go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import zrpc
from tests.support.identity import Same, event
from tests.support.observed import busy
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh

# The calls themselves have no time-out that would end a circle.
pytestmark = [
    pytest.mark.zrpc(workers=3, options={"rpc_timeout": 0}),
    pytest.mark.usefixtures("caller"),
]


# Longer than any test: such a batch begins when it is full.
FULL = SOON * 10


class Both(Same):
    """Opens when two have come."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)

    def meet(self) -> None:
        self.barrier.wait(SOON)


@zrpc.actor
class Node:
    def __init__(self) -> None:
        self.done = 0

    def touch(self) -> int:
        self.done += 1
        return self.done

    def call(self, *others: Any) -> Any:
        """Calls the first of the others, which calls the next one, and so on."""
        if not others:
            return self.touch()
        return others[0].rpc_sync().call(*others[1:])

    @zrpc.batched(max_size=2, max_wait=FULL)
    def touch_all(self, others: list[Any]) -> list[int]:
        return [touch(other) for other in others]

    @zrpc.batched(max_size=2, max_wait=FULL)
    async def touch_all_in_loop(self, others: list[Any]) -> list[int]:
        return [await touch_in_task(other) for other in others]

    async def acall(self, *others: Any) -> Any:
        if not others:
            return self.touch()
        return await others[0].rpc_async().acall(*others[1:])

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)

    async def run_in_loop(self, function: Any, *args: Any) -> Any:
        return await function(*args)

    def items_of(self, other: Any) -> Iterator[Any]:
        yield other.rpc_sync().touch()

    async def items_in_loop(self, other: Any) -> AsyncIterator[Any]:
        yield await other.rpc_async().touch()

    def count_up(self) -> Iterator[int]:
        yield from range(10**9)

    async def count_up_in_loop(self) -> AsyncIterator[int]:
        for number in range(10**9):
            yield number


def touch(node: Any) -> Any:
    return node.rpc_sync().touch()


@zrpc.functions.async_execution
def touch_later(node: Any) -> Any:
    return node.rpc_async().touch()


async def touch_in_task(node: Any) -> Any:
    return await node.rpc_async().touch()


async def awaited(awaitable: Any) -> Any:
    return await awaitable


async def in_a_task_group(awaitable: Any) -> Any:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(awaited(awaitable))
    return task.result()


def apply(function: Any, *args: Any) -> Any:
    return function(*args)


def await_circle(_: Any) -> None:
    """Ends when the circle was found."""
    assert event("circle").wait(SOON)


def touch_and_tell(node: Any) -> Any:
    try:
        return touch(node)
    finally:
        event("circle").set()


def touch_soon(node: Any) -> Iterator[Any]:
    yield touch(node)


def slowly(_: Any) -> Iterator[int]:
    for number in range(3):
        time.sleep(0.6)  # together as long as it takes to find several circles
        yield number


def end_late(_: Any) -> str:
    time.sleep(1.8)  # as long as it takes to find several circles
    return "late"


def relay(stream_of: Any) -> Iterator[int]:
    yield from stream_of.rpc_stream(prefetch=2).count_up()


CIRCLE = "actors wait in a circle"


def two(mesh: Mesh) -> tuple[Any, Any]:
    nodes = zrpc.remote(1, Node), zrpc.remote(2, Node)
    for node in nodes:
        node.ready()
    return nodes


def test_an_actor_that_calls_itself_by_its_rref_gets_an_error_that_names_it() -> None:
    node = zrpc.remote(1, Node)
    node.ready()
    with pytest.raises(zrpc.RpcError, match=CIRCLE) as caught:
        node.rpc_sync().run(touch, node)
    for part in ("waits for its turn on the actor Node", "runs Node.run", "touch"):
        assert part in str(caught.value)
    assert node.rpc_sync().touch() == 1


@pytest.mark.parametrize("method", ["call", "acall"])
def test_a_circle_over_two_workers_is_found(caller: Mesh, method: str) -> None:
    a, b = two(caller)
    for nodes in ((a, b, a), (a, b, b), (b, a, b, a)):
        with pytest.raises(zrpc.RpcError, match=CIRCLE) as caught:
            getattr(nodes[0].rpc_sync(), method)(*nodes[1:])
        assert caught.value.executed is None  # of the call that has begun the others
    assert zrpc.wait_all([a.rpc_async().touch(), b.rpc_async().touch()]) == [1, 1]


# Each waits for the actor that runs it.


def wait_for_workers(other: Any, own: Any) -> Any:
    slow_and_circle = zrpc.each([await_circle, touch_and_tell])
    return zrpc.rpc_sync(zrpc.group("worker[02]"), apply, args=(slow_and_circle, own))


def read_and_call(other: Any, own: Any) -> None:
    for _ in other.rpc_stream(prefetch=2).count_up():
        other.rpc_sync().touch()


WAYS: dict[str, Any] = {
    "a function of another worker": lambda other, own: zrpc.rpc_sync(2, touch, args=(own,)),
    "a function of its own worker": lambda other, own: zrpc.rpc_sync(1, touch, args=(own,)),
    "all futures": lambda *nodes: zrpc.wait_all([each.rpc_async().touch() for each in nodes]),
    "the first future": lambda _, own: next(zrpc.as_completed([own.rpc_async().touch()])).wait(),
    "a future of futures": lambda *nodes: [
        each.wait() for each in zrpc.collect_all([n.rpc_async().touch() for n in nodes]).wait()
    ],
    "a function with a future": lambda _, own: zrpc.rpc_sync(2, touch_later, args=(own,)),
    "a callback": lambda _, own: own.rpc_async().touch().then(lambda each: each.wait()).wait(),
    "a copy": lambda other, own: own.to_here(),
    "a value": lambda other, own: own.remote().touch().to_here(),
    "a value for another": lambda other, own: other.rpc_sync().run(WAYS["a value"], other, own),
    "a stream": lambda other, own: list(other.rpc_stream().items_of(own)),
    "a stream of a group": lambda other, own: list(
        zrpc.group([other, other]).rpc_stream().items_of(own)
    ),
    "a shared stream": lambda other, own: list(
        zrpc.rpc_stream(zrpc.group("worker2"), touch, args=(zrpc.share([own]),))
    ),
    "a stream that rests": read_and_call,
    "a group": lambda *nodes: zrpc.group(nodes).rpc_sync().touch(),
    "a group of workers": wait_for_workers,
    "shared items": lambda other, own: zrpc.rpc_sync(
        zrpc.group("worker[02]"), touch, args=(zrpc.share([own] * 2),)
    ),
}


async def read_in_loop(other: Any, own: Any) -> Any:
    return [item async for item in other.rpc_stream().items_in_loop(own)]


async def read_and_call_in_loop(other: Any, own: Any) -> None:
    async for _ in other.rpc_stream(prefetch=2).count_up_in_loop():
        await other.rpc_async().touch()


async def await_task(other: Any, own: Any) -> Any:
    return await asyncio.create_task(touch_in_task(own))


async def await_one(other: Any, own: Any) -> Any:
    tasks = [asyncio.create_task(touch_in_task(own))]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return [task.result() for task in done]


async def await_tasks(other: Any, own: Any) -> Any:
    shielded = asyncio.shield(asyncio.create_task(in_a_task_group(touch_in_task(own))))
    return await asyncio.gather(asyncio.wait_for(shielded, SOON), asyncio.sleep(0))


AWAITS = [read_in_loop, read_and_call_in_loop, await_task, await_one, await_tasks]


def test_circles_through_other_ways_are_found(caller: Mesh) -> None:
    """Each is a circle of its own; all are there at once."""
    nodes, futures = [], {}
    for way in [*WAYS, *AWAITS]:
        a, b = two(caller)
        nodes += [a, b]
        proxy = a.rpc_async(SOON)
        futures[way] = proxy.run(WAYS[way], b, a) if way in WAYS else proxy.run_in_loop(way, b, a)
    for way, future in futures.items():
        with pytest.raises((zrpc.RpcError, ExceptionGroup)) as caught:
            future.wait()
        assert CIRCLE in repr(caught.value), way
    assert zrpc.wait_all([each.rpc_async(SOON).touch() for each in nodes])


@pytest.mark.parametrize("method", ["count_up", "count_up_in_loop"])
@pytest.mark.parametrize("read", [0, 3])
def test_a_call_by_the_reader_of_a_stream_fails(caller: Mesh, method: str, read: int) -> None:
    a, _ = two(caller)
    stream = getattr(a.rpc_stream(prefetch=2), method)()
    assert [next(stream) for _ in range(read)] == [*range(read)]
    with pytest.raises(zrpc.RpcError, match=rf"the stream Node.{method} .*rests") as caught:
        a.rpc_sync().touch()
    assert CIRCLE in str(caught.value)
    assert caught.value.executed is False
    assert [next(stream) for _ in range(3)] == [*range(read, read + 3)]  # it goes on
    stream.close()
    assert a.rpc_sync(SOON).touch() == 1


def test_a_second_stream_behind_one_that_its_reader_has_fails(caller: Mesh) -> None:
    a, b = two(caller)
    with zrpc.group([a, b]).rpc_stream(prefetch=2).count_up() as stream:
        assert next(stream)[1] == 0
        with pytest.raises(zrpc.RpcError, match=CIRCLE):
            next(a.rpc_stream().count_up())
        with pytest.raises(zrpc.GroupError, match=CIRCLE):
            next(zrpc.group([a, b]).rpc_stream().count_up())
    assert a.rpc_sync(SOON).touch() == 1


@pytest.mark.parametrize(
    "wait",
    [
        awaited,
        lambda call: asyncio.wait_for(call, SOON),
        asyncio.gather,
        in_a_task_group,
        lambda call: asyncio.create_task(awaited(call)),
    ],
    ids=["await", "wait_for", "gather", "TaskGroup", "create_task"],
)
def test_a_call_that_a_task_awaits_while_it_reads_a_stream_fails(caller: Mesh, wait: Any) -> None:
    a, b = two(caller)

    async def main(source: Any) -> None:
        async for _ in source.rpc_stream(prefetch=2).count_up():
            await wait(a.rpc_async(SOON).touch())

    for source in (a, zrpc.group([a, b])):
        with pytest.raises((zrpc.RpcError, ExceptionGroup)) as caught:
            asyncio.run(main(source))
        assert CIRCLE in repr(caught.value)
        assert "a coroutine waits for Node.touch" in repr(caught.value)
    assert a.rpc_sync(SOON).touch() == 1


def test_a_circle_through_a_stream_of_a_stream_is_found(caller: Mesh) -> None:
    a, _ = two(caller)
    with zrpc.rpc_stream(2, relay, args=(a,), prefetch=2) as stream:
        assert next(stream) == 0
        with pytest.raises(zrpc.RpcError, match=r"Node.count_up .*relay .*rests"):
            a.rpc_sync().touch()
    assert a.rpc_sync(SOON).touch() == 1


def test_a_call_behind_a_stream_that_another_thread_reads_waits_its_turn(caller: Mesh) -> None:
    a, _ = two(caller)
    has_read = threading.Event()
    stream = a.rpc_stream(prefetch=2).count_up()

    def read() -> None:
        with caller.agent(0).as_current():
            next(stream)
            has_read.set()
            time.sleep(1.5)  # as long as it takes to find several circles
            stream.close()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_read.wait(SOON)
    assert a.rpc_sync(SOON).touch() == 1
    thread.join(SOON)


def read_the_quick_one(own: Any) -> list[Any]:
    run = zrpc.each([touch_soon, slowly])
    with zrpc.rpc_stream(zrpc.group("worker[02]"), apply, args=(run, own)) as stream:
        return [next(stream)[1] for _ in range(3)]


def call_the_quick_one(own: Any) -> list[Any]:
    stuck, quick = own.rpc_async().touch(), zrpc.rpc_async(2, end_late, args=(own,))
    first = next(zrpc.as_completed([stuck, quick]))
    stuck.cancel()
    return [first is quick, first.wait()]


async def await_the_quick_one(own: Any) -> list[Any]:
    ways = touch_in_task(own), zrpc.rpc_async(2, end_late, args=(own,))
    tasks = [asyncio.ensure_future(each) for each in ways]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks[0].cancel()
    return [done == {tasks[1]}, tasks[1].result()]


def test_if_one_of_several_goes_on_it_is_no_circle(caller: Mesh) -> None:
    """The actor may leave the others: it closes the stream, or cancels the call of itself."""
    (a, b), c = two(caller), zrpc.remote(1, Node)
    reads = a.rpc_async(SOON).run(read_the_quick_one, a)
    calls = b.rpc_async(SOON).run(call_the_quick_one, b)
    awaits = c.rpc_async(SOON).run_in_loop(await_the_quick_one, c)
    assert reads.wait() == [0, 1, 2]
    assert zrpc.wait_all([calls, awaits]) == [[True, "late"]] * 2


def meet_and_call(both: Both, other: Any) -> str:
    both.meet()
    try:
        return str(other.rpc_sync().touch())
    except zrpc.RpcError as error:
        return str(error)


def test_two_calls_that_cross_each_other_are_found(caller: Mesh) -> None:
    (a, b), both = two(caller), Both()
    texts = zrpc.wait_all(
        [a.rpc_async().run(meet_and_call, both, b), b.rpc_async().run(meet_and_call, both, a)]
    )
    assert any(CIRCLE in text for text in texts)
    assert all(CIRCLE in text or text.isdigit() for text in texts)
    zrpc.wait_all([a.rpc_async().touch(), b.rpc_async().touch()])


def test_an_actor_with_room_for_two_calls_may_call_itself_once() -> None:
    node = zrpc.remote(1, zrpc.actor(Node, concurrency=2))
    assert node.rpc_sync().call(node) == 1
    with pytest.raises(zrpc.RpcError, match=CIRCLE):
        node.rpc_sync().call(node, node)
    assert node.rpc_sync().touch() == 2


# -- batches, which wait for what any of their calls asks for ----------------------------------


@zrpc.batched(max_size=2, max_wait=FULL)
def touch_all(others: list[Any]) -> list[int]:
    return [touch(other) for other in others]


def join(method: str, node: Any, item: Any) -> Any:
    """Adds an item to a batch of a node's method, or of a function of worker1."""
    if method:
        return getattr(node.rpc_sync(SOON), method)(item)
    return zrpc.rpc_sync(1, touch_all, args=(item,), timeout=SOON)


def check_circles(futures: list[Any], text: str = "") -> None:
    for future in futures:
        with pytest.raises(zrpc.RpcError, match=CIRCLE) as caught:
            future.wait()
        assert text in str(caught.value)


@pytest.mark.parametrize("method", ["touch_all", "touch_all_in_loop"])
def test_a_batch_that_calls_its_own_actor_fails(caller: Mesh, method: str) -> None:
    a, b = two(caller)
    futures = [getattr(a.rpc_async(SOON), method)(other) for other in (b, a)]
    check_circles(futures, f"waits for its turn on the actor Node, which runs Node.{method}")
    assert a.rpc_sync(SOON).touch()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("method", ["touch_all", "touch_all_in_loop", ""])
def test_a_circle_by_any_call_of_a_batch_is_found(caller: Mesh, method: str, place: int) -> None:
    b, a = two(caller)
    free, futures = zrpc.remote(0, Node), []
    for number in range(2):
        if number == place:
            futures.append(a.rpc_async(SOON).run(join, method, b, a))
        else:
            futures.append(zrpc.rpc_async(0, join, args=(method, b, free), timeout=SOON))
        until(lambda: busy(caller) > 0)  # so the other one comes later
    check_circles(futures)
    assert zrpc.wait_all([each.rpc_async(SOON).touch() for each in (a, b)])
