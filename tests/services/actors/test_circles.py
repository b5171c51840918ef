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
from tests.support.waiting import SOON
from zrpc.services.inspection.circles import Circle
from zrpc.testing import Mesh
from zrpc.wire.member_id import MemberId

# The calls themselves have no time-out that would end a circle.
pytestmark = pytest.mark.zrpc(workers=3, options={"rpc_timeout": 0})


class Both(Same):
    """Opens when two have come."""

    def __init__(self) -> None:
        import threading

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

    async def acall(self, *others: Any) -> Any:
        if not others:
            return self.touch()
        return await others[0].rpc_async().acall(*others[1:])

    def call_through(self, to: int, other: Any) -> Any:
        return zrpc.rpc_sync(to, touch, args=(other,))

    def call_all(self, *others: Any) -> Any:
        return zrpc.wait_all([other.rpc_async().touch() for other in others])

    def call_first(self, *others: Any) -> Any:
        return next(zrpc.as_completed([other.rpc_async().touch() for other in others])).wait()

    def call_the_quick_one(self, own: Any) -> list[Any]:
        stuck, quick = own.rpc_async().touch(), zrpc.rpc_async(2, end_late, args=(own,))
        first = next(zrpc.as_completed([stuck, quick]))
        stuck.cancel()
        return [first is quick, first.wait()]

    def call_collected(self, *others: Any) -> Any:
        futures = zrpc.collect_all([other.rpc_async().touch() for other in others])
        return [future.wait() for future in futures.wait()]

    def call_with_a_future(self, to: int, other: Any) -> Any:
        return zrpc.rpc_sync(to, touch_later, args=(other,))

    async def call_in(self, way: Any, own: Any) -> Any:
        return await way(touch_in_task(own))

    async def await_the_quick_one(self, own: Any) -> Any:
        ways = touch_in_task(own), zrpc.rpc_async(2, end_late, args=(own,))
        tasks = [asyncio.ensure_future(each) for each in ways]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks[0].cancel()
        return [done == {tasks[1]}, tasks[1].result()]

    def call_then(self, other: Any) -> Any:
        return other.rpc_async().touch().then(lambda future: future.wait()).wait()

    def fetch(self, other: Any) -> Any:
        return other.to_here()

    def make_and_fetch(self, other: Any) -> Any:
        return other.remote().touch().to_here()

    def call_and_fetch(self, first: Any, second: Any) -> Any:
        return first.rpc_sync().make_and_fetch(second)

    def meet_and_call(self, both: Both, other: Any) -> Any:
        both.meet()
        return other.rpc_sync().touch()

    def items_of(self, other: Any) -> Iterator[Any]:
        yield other.rpc_sync().touch()

    async def items_in_loop(self, other: Any) -> AsyncIterator[Any]:
        yield await other.rpc_async().touch()

    def count_up(self) -> Iterator[int]:
        yield from range(10**9)

    async def count_up_in_loop(self) -> AsyncIterator[int]:
        for number in range(10**9):
            yield number

    def read_items(self, other: Any, own: Any) -> Any:
        return list(other.rpc_stream().items_of(own))

    async def read_in_loop(self, other: Any, own: Any) -> Any:
        return [item async for item in other.rpc_stream().items_in_loop(own)]

    def read_group(self, other: Any, own: Any) -> Any:
        return list(zrpc.group([other, other]).rpc_stream().items_of(own))

    def read_shared(self, other: Any, own: Any) -> Any:
        return list(zrpc.rpc_stream(zrpc.group("worker2"), touch, args=(zrpc.share([own]),)))

    def read_the_quick_one(self, other: Any, own: Any) -> list[Any]:
        run = zrpc.each([touch_soon, slowly])
        with zrpc.rpc_stream(zrpc.group("worker[02]"), apply, args=(run, own)) as stream:
            return [next(stream)[1] for _ in range(3)]

    def call_group(self, other: Any, own: Any) -> Any:
        return zrpc.group([other, own]).rpc_sync().touch()

    def call_workers(self, other: Any, own: Any) -> Any:
        slow_and_circle = zrpc.each([await_circle, touch_and_tell])
        return zrpc.rpc_sync(zrpc.group("worker[02]"), apply, args=(slow_and_circle, own))

    def call_shared(self, other: Any, own: Any) -> Any:
        return zrpc.rpc_sync(zrpc.group("worker[02]"), touch, args=(zrpc.share([own] * 2),))

    def read_and_call(self, other: Any, own: Any) -> Any:
        for _ in other.rpc_stream(prefetch=2).count_up():
            other.rpc_sync().touch()

    async def read_and_call_in_loop(self, other: Any, own: Any) -> Any:
        async for _ in other.rpc_stream(prefetch=2).count_up_in_loop():
            await other.rpc_async().touch()

    def catch(self, other: Any) -> str:
        try:
            other.rpc_sync().touch()
        except zrpc.RpcError as error:
            return f"{error.executed}: {error}"
        return ""


def touch(node: Any) -> Any:
    return node.rpc_sync().touch()


@zrpc.functions.async_execution
def touch_later(node: Any) -> Any:
    return node.rpc_async().touch()


async def touch_in_task(node: Any) -> Any:
    return await node.rpc_async().touch()


async def in_group(coroutine: Any) -> Any:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(coroutine)
    return task.result()


async def in_wait(coroutine: Any) -> Any:
    when = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait([asyncio.create_task(coroutine)], return_when=when)
    return [task.result() for task in done]


async def in_wait_for(coroutine: Any) -> Any:
    return await asyncio.wait_for(coroutine, SOON)


async def in_tasks(coroutine: Any) -> Any:
    return await asyncio.gather(asyncio.create_task(in_group(coroutine)), asyncio.sleep(0))


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


def stop(node: Any) -> None:
    node.stop()


@zrpc.actor
class Quitter:
    closed = 0  # of this process, so of all workers

    def stop_through(self, to: int, me: Any) -> str:
        try:
            zrpc.rpc_sync(to, stop, args=(me,))
        except zrpc.RpcError as error:
            return str(error)
        return ""

    def close(self) -> None:
        Quitter.closed += 1


def outcome(future: Any) -> str:
    try:
        return str(future.wait())
    except zrpc.RpcError as error:
        return str(error)


CIRCLE = "actors wait in a circle"


def two(mesh: Mesh) -> tuple[Any, Any]:
    nodes = zrpc.remote(1, Node), zrpc.remote(2, Node)
    for node in nodes:
        node.ready()
    return nodes


def test_an_actor_that_calls_itself_by_its_rref_gets_an_error_that_names_it(caller: Mesh) -> None:
    node = zrpc.remote(1, Node)
    node.ready()
    began = time.monotonic()
    text = node.rpc_sync().catch(node)
    assert time.monotonic() - began < SOON
    assert text.startswith("False: ")
    for part in (CIRCLE, "waits for its turn on the actor Node", "runs Node.catch", "touch"):
        assert part in text
    assert node.rpc_sync().touch() == 1


@pytest.mark.parametrize("method", ["call", "acall"])
def test_a_circle_over_two_workers_is_found(caller: Mesh, method: str) -> None:
    a, b = two(caller)
    for nodes in ((a, b, a), (a, b, b), (b, a, b, a)):
        with pytest.raises(zrpc.RpcError, match=CIRCLE) as caught:
            getattr(nodes[0].rpc_sync(), method)(*nodes[1:])
        assert caught.value.executed is None  # of the call that has begun the others
    assert zrpc.wait_all([a.rpc_async().touch(), b.rpc_async().touch()]) == [1, 1]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("call_through", "2a"),
        ("call_through", "1a"),
        ("call_all", "ba"),
        ("call_first", "a"),
        ("call_collected", "ba"),
        ("call_with_a_future", "2a"),
        ("call_then", "a"),
        ("fetch", "a"),
        ("make_and_fetch", "a"),
        ("call_and_fetch", "ba"),
    ],
)
def test_a_circle_through_other_ways_is_found(caller: Mesh, method: str, arguments: str) -> None:
    a, b = two(caller)
    meaning = {"a": a, "b": b, "1": 1, "2": 2}
    with pytest.raises(zrpc.RpcError, match=CIRCLE):
        getattr(a.rpc_sync(), method)(*(meaning[each] for each in arguments))
    assert a.rpc_sync().touch() == 1


@pytest.mark.parametrize(
    "way", [asyncio.create_task, asyncio.shield, in_group, in_tasks, in_wait, in_wait_for]
)
def test_a_circle_through_tasks_is_found(caller: Mesh, way: Any) -> None:
    a, _ = two(caller)
    with pytest.raises((zrpc.RpcError, ExceptionGroup)) as caught:
        a.rpc_sync(SOON).call_in(way, a)
    assert CIRCLE in repr(caught.value)
    assert a.rpc_sync(SOON).touch() == 1


@pytest.mark.parametrize(
    "method",
    [
        "read_items",
        "read_in_loop",
        "read_group",
        "read_shared",
        "call_group",
        "call_workers",
        "call_shared",
        "read_and_call",
        "read_and_call_in_loop",
    ],
)
def test_a_circle_through_groups_and_streams_is_found(caller: Mesh, method: str) -> None:
    a, b = two(caller)
    with pytest.raises(zrpc.RpcError, match=CIRCLE):
        getattr(a.rpc_sync(SOON), method)(b, a)
    assert zrpc.wait_all([a.rpc_async(SOON).touch(), b.rpc_async(SOON).touch()])


@pytest.mark.parametrize("method", ["count_up", "count_up_in_loop"])
@pytest.mark.parametrize("read", [0, 3])
def test_a_call_by_the_reader_of_a_stream_fails_with_the_streams_name(
    caller: Mesh, method: str, read: int
) -> None:
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


def test_a_call_by_a_task_that_reads_a_stream_fails(caller: Mesh) -> None:
    a, b = two(caller)

    async def main(source: Any) -> None:
        async for _ in source.rpc_stream(prefetch=2).count_up():
            await a.rpc_async().touch()

    for source in (a, zrpc.group([a, b])):
        with pytest.raises(zrpc.RpcError, match=r"a coroutine waits for Node\.touch"):
            asyncio.run(main(source))
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


def test_a_group_with_a_member_that_goes_on_is_no_circle(caller: Mesh) -> None:
    """The reader may leave before it needs the member that waits for it."""
    a, b = two(caller)
    found = a.rpc_sync(SOON).read_the_quick_one(b, a)
    assert found == [0, 1, 2]


def test_one_future_of_several_that_goes_on_is_no_circle(caller: Mesh) -> None:
    """The actor may leave the others: here it cancels the call of itself."""
    a, b = two(caller)
    futures = a.rpc_async(SOON).call_the_quick_one(a), b.rpc_async(SOON).await_the_quick_one(b)
    assert zrpc.wait_all(futures) == [[True, "late"]] * 2


def test_an_actor_that_stops_itself_through_another_worker_gets_an_error_and_ends(
    caller: Mesh,
) -> None:
    quitter = zrpc.remote(1, Quitter)
    assert CIRCLE in quitter.rpc_sync().stop_through(2, quitter)
    quitter.stop()  # waits for the first stop
    assert Quitter.closed == 1
    with pytest.raises(zrpc.RpcError, match="was stopped by worker2"):
        quitter.rpc_sync().stop_through(2, quitter)


def test_two_calls_that_cross_each_other_are_found(caller: Mesh) -> None:
    a, b = two(caller)
    both = Both()
    futures = [a.rpc_async().meet_and_call(both, b), b.rpc_async().meet_and_call(both, a)]
    texts = [outcome(future) for future in futures]
    assert any(CIRCLE in text for text in texts)
    assert all(CIRCLE in text or text.isdigit() for text in texts)
    zrpc.wait_all([a.rpc_async().touch(), b.rpc_async().touch()])


def test_an_actor_with_room_for_two_calls_may_call_itself_once(caller: Mesh) -> None:
    node = zrpc.remote(1, zrpc.actor(Node, concurrency=2))
    assert node.rpc_sync().call(node) == 1
    with pytest.raises(zrpc.RpcError, match=CIRCLE):
        node.rpc_sync().call(node, node)
    assert node.rpc_sync().touch() == 2


def slow(both: Both) -> str:
    both.meet()
    return "slow"


@zrpc.actor
class Busy(Node):
    def wait(self, both: Both) -> str:
        return zrpc.rpc_sync(2, slow, args=(both,))


def test_a_long_wait_that_is_no_circle_is_left_alone(caller: Mesh) -> None:
    busy, both = zrpc.remote(1, Busy), Both()
    running = busy.rpc_async().wait(both)
    waiting = busy.rpc_async().touch()
    began = time.monotonic()
    while time.monotonic() - began < 1.5:  # as long as it takes to find several circles
        zrpc.rpc_sync(1, max, args=(1, 2))
        time.sleep(0.05)
    assert not waiting.done()
    both.meet()
    assert (running.wait(), waiting.wait()) == ("slow", 1)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[[[1]], 1]", b'[[["a", 1]], ""]', b"\xff"])
def test_bytes_that_are_no_circle_are_refused(body: bytes) -> None:
    with pytest.raises(zrpc.RpcError, match="expected a circle of calls"):
        Circle.parse(body)
    circle = Circle([(MemberId(1), 2)], "text \ud800")
    assert Circle.parse(circle.dump()) == circle
