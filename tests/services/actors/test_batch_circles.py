"""Circles of actors through a batch, which waits for what any of its calls asks for."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.support.observed import busy
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh

# The calls themselves have no time-out that would end a circle.
pytestmark = pytest.mark.zrpc(workers=3, options={"rpc_timeout": 0})

# Longer than any test: such a batch begins when it is full.
FULL = SOON * 10


@zrpc.actor
class Node:
    def touch(self) -> bool:
        return True

    @zrpc.batched(max_size=2, max_wait=FULL)
    def touch_all(self, others: list[Any]) -> list[bool]:
        return [other.rpc_sync().touch() for other in others]

    @zrpc.batched(max_size=2, max_wait=FULL)
    async def touch_all_in_loop(self, others: list[Any]) -> list[bool]:
        return [await other.rpc_async().touch() for other in others]

    def join(self, function: Any, own: Any) -> Any:
        return zrpc.rpc_sync(1, function, args=(own,))

    def join_actor(self, method: str, other: Any, own: Any) -> Any:
        return getattr(other.rpc_sync(), method)(own)


@zrpc.batched(max_size=2, max_wait=FULL)
def touch_all(others: list[Any]) -> list[bool]:
    return [other.rpc_sync().touch() for other in others]


def failures(futures: list[Any]) -> list[str]:
    found = []
    for future in futures:
        with pytest.raises(zrpc.RpcError, match="actors wait in a circle") as caught:
            future.wait()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("method", ["touch_all", "touch_all_in_loop"])
def test_a_batch_that_calls_its_own_actor_fails(caller: Mesh, method: str) -> None:
    a, b = zrpc.remote(1, Node), zrpc.remote(2, Node)
    futures = [getattr(a.rpc_async(SOON), method)(other) for other in (b, a)]
    for text in failures(futures):
        assert f"waits for its turn on the actor Node, which runs Node.{method}" in text
    assert a.rpc_sync(SOON).touch()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("method", ["touch_all", "touch_all_in_loop", ""])
def test_a_circle_through_any_call_of_a_batch_is_found(
    caller: Mesh, method: str, place: int
) -> None:
    a, b, free = (zrpc.remote(to, Node) for to in (2, 1, 0))
    futures = []
    for number in range(2):
        if number != place:
            call = (
                getattr(b.rpc_async(SOON), method)(free)
                if method
                else zrpc.rpc_async(1, touch_all, args=(free,), timeout=SOON)
            )
        elif method:
            call = a.rpc_async(SOON).join_actor(method, b, a)
        else:
            call = a.rpc_async(SOON).join(touch_all, a)
        futures.append(call)
        until(lambda: busy(caller) > 0)  # so the other one comes later
    failures(futures)
    assert zrpc.wait_all([each.rpc_async(SOON).touch() for each in (a, b)])
