"""Actors that wait for each other: the calls of the circle fail, and the others go on."""

from __future__ import annotations

import time
from typing import Any

import pytest

import zrpc
from tests.support.identity import Same
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

    def catch(self, other: Any) -> str:
        try:
            other.rpc_sync().touch()
        except zrpc.RpcError as error:
            return f"{error.executed}: {error}"
        return ""


def touch(node: Any) -> Any:
    return node.rpc_sync().touch()


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
