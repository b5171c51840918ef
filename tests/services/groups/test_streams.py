"""Streams of groups: the items of all members as they come, and their ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import zrpc
from tests.services.streams.conftest import Tap, _no_stream_is_left, read_by_threads  # noqa: F401
from tests.services.streams.test_items import count
from tests.support.gates import Gate
from tests.support.identity import here
from tests.support.waiting import until
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=90, options={"rpc_timeout": 40})


def taps(number: int = 3, **kwargs: Any) -> tuple[list[Tap], Any]:
    """Generators that the test watches, one for each member, and the function that runs them."""
    made = [Tap(**kwargs) for _ in range(number)]
    return made, lambda tap: tap.run()


def read(stream: Any) -> tuple[list[Any], dict[int, str]]:
    """Returns the items of a stream, sorted, and the names of its errors."""
    found: list[Any] = []
    try:
        found.extend(stream)
    except zrpc.GroupError as error:
        return sorted(found), {place: type(each).__name__ for place, each in error.errors.items()}
    return sorted(found), {}


class Model:
    def generate(self, prompt: Any) -> Iterator[Any]:
        yield from prompt

    async def generate_in_loop(self, prompt: Any) -> AsyncIterator[Any]:
        for token in prompt:
            await asyncio.sleep(0)
            yield token

    def length(self, prompt: Any) -> int:
        return len(prompt)

    async def length_in_loop(self, prompt: Any) -> int:
        await asyncio.sleep(0)
        return len(prompt)

    @zrpc.batched(max_size=2, max_wait=0)
    def length_in_batch(self, prompts: list[Any]) -> list[int]:
        return [len(prompt) for prompt in prompts]

    @zrpc.functions.async_execution
    def length_later(self, prompt: Any) -> Any:
        return zrpc.rpc_async(0, len, args=(prompt,))


# -- items -----------------------------------------------------------------------------------------


def test_all_items_come_with_their_places(caller: Mesh) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), count, args=(zrpc.each([300, 0, 200]),), prefetch=7)
    found: dict[int, list[int]] = {0: [], 2: []}
    for place, item in stream:
        found[place].append(item)
    assert found == {0: [*range(300)], 2: [*range(200)]}
    for make in (Model, zrpc.actor(Model)):
        models = zrpc.remote(zrpc.group("*"), make)
        for method in ("generate", "generate_in_loop"):
            stream = getattr(models.rpc_stream(prefetch=1), method)
            assert sorted(stream(zrpc.split([1, 2, 3, 4]))) == [(0, 1), (0, 2), (1, 3), (2, 4)]
            assert sorted(getattr(models[1:].rpc_stream(), method)("a")) == [(0, "a"), (1, "a")]
            assert list(getattr(models[:0].rpc_stream(), method)("a")) == []
            assert method in repr(stream([]))


def test_a_member_that_makes_nothing_holds_up_no_other(caller: Mesh, gate: Gate) -> None:
    def run(slow: bool) -> Iterator[Any]:
        yield gate.wait_inside("slow") if slow else "quick"

    stream = zrpc.rpc_stream(zrpc.group("*"), here(run), args=(zrpc.each([True, False, False]),))
    assert sorted([next(stream), next(stream)]) == [(1, "quick"), (2, "quick")]
    gate.open()
    assert list(stream) == [(0, "slow")]


def test_each_member_is_at_most_so_far_ahead(caller: Mesh) -> None:
    made, run = taps()
    stream = zrpc.rpc_stream(zrpc.group("*"), run, args=(zrpc.each(made),), prefetch=3)
    taken = Counter({0: 0, 1: 0, 2: 0})
    for _ in range(40):
        place, _ = next(stream)
        taken[place] += 1
        assert all(tap.made <= taken[each] + 3 + 1 for each, tap in enumerate(made))
    assert all(taken.values())  # they take turns
    for place, tap in enumerate(made):
        tap.await_made(taken[place] + 2)
    stream.close()


def test_a_stream_of_a_group_can_be_read_in_an_event_loop(caller: Mesh, gate: Gate) -> None:
    def run(n: int) -> Iterator[int]:
        yield 0
        yield gate.wait_inside(n)

    async def main() -> list[Any]:
        found = []
        async for item in zrpc.rpc_stream(zrpc.group("*"), here(run), args=(5,)):
            found.append(item)
            if len(found) == 3:
                gate.open()
        async with zrpc.rpc_stream(zrpc.group("*"), count, args=(10**9,)) as stream:
            await anext(stream)
        return found

    assert sorted(asyncio.run(main())) == [(p, i) for p in range(3) for i in (0, 5)]


def test_several_threads_share_the_items_of_a_group(caller: Mesh) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), count, args=(300,), prefetch=5)
    assert read_by_threads(stream, 3) == [(p, i) for p in range(3) for i in range(300)]


# -- share -----------------------------------------------------------------------------------------

PROMPTS = ["a", "bc", "", "def"]


def test_plain_results_of_shared_items_come_alone(caller: Mesh) -> None:
    for make in (Model, zrpc.actor(Model)):
        models = zrpc.remote(zrpc.group("*"), make)
        for method in ("length", "length_in_loop", "length_later", "length_in_batch"):
            stream = getattr(models.rpc_stream(), method)
            assert sorted(stream(zrpc.share(PROMPTS * 5))) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
            assert list(stream(zrpc.share([]))) == []
    assert list(zrpc.rpc_stream(zrpc.group("*"), print, (zrpc.share([""]),), {"end": ""})) == [None]


def test_items_of_generators_come_with_the_place_of_the_shared_item(caller: Mesh) -> None:
    models = zrpc.remote(zrpc.group("*"), Model)
    for method in ("generate", "generate_in_loop"):
        stream = getattr(models.rpc_stream(), method)(zrpc.share(PROMPTS))
        assert sorted(stream) == [(0, "a"), (1, "b"), (1, "c"), (3, "d"), (3, "e"), (3, "f")]


def test_results_come_as_they_are_ready(caller: Mesh, gate: Gate) -> None:
    def work(item: int) -> int:
        return gate.wait_inside(item) if item == 0 else item

    stream = zrpc.rpc_stream(zrpc.group("worker[12]"), here(work), args=(zrpc.share(range(8)),))
    assert [next(stream) for _ in range(7)] == [*range(1, 8)]
    gate.open()
    assert list(stream) == [0]


def test_a_member_is_at_most_one_item_ahead_of_a_slow_reader(caller: Mesh) -> None:
    begun: list[int] = []
    at_once = Counter[str]()

    def work(item: int) -> int:
        name = zrpc.get_worker_info().name
        at_once[name] += 1
        assert at_once[name] == 1
        begun.append(item)
        at_once[name] -= 1
        return item

    stream = zrpc.rpc_stream(zrpc.group("worker[12]"), here(work), args=(zrpc.share(range(20)),))
    until(lambda: len(begun) == 4)
    for taken in range(20):
        assert len(begun) <= taken + 4 + 1
        next(stream)
    assert list(stream) == []
    assert sorted(begun) == [*range(20)]


def test_shared_items_that_fail(caller: Mesh) -> None:
    stream = zrpc.rpc_stream(
        zrpc.group("*"), {0: "a", 3: "d"}.__getitem__, args=(zrpc.share(range(4)),)
    )
    with pytest.raises(zrpc.GroupError, match="2 of 4 items failed: item 1: KeyError") as caught:
        list(stream)
    assert (sorted(caught.value.errors), caught.value.results) == ([1, 2], {0: None, 3: None})
    assert read(zrpc.rpc_stream(zrpc.group("*"), abs, args=(zrpc.share([-1, "b"]),))) == (
        [1],
        {1: "TypeError"},
    )


def test_closing_gives_out_no_more_items(caller: Mesh, gate: Gate) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), gate.wait_inside, args=(zrpc.share(range(9)),))
    gate.await_entry(3)
    stream.close()
    gate.open()
    assert list(stream) == []
    assert not gate.entered.acquire(timeout=0.05)


def test_the_items_of_a_member_that_dies_go_to_the_others(caller: Mesh, gate: Gate) -> None:
    def work(item: int) -> int:
        if zrpc.get_worker_info().name == "worker1":
            gate.wait_inside()
        return item

    group = zrpc.group("worker[12]")
    stream = zrpc.rpc_stream(group, here(work), args=(zrpc.share(range(10)),))
    gate.await_entry()
    caller.agent(1).close()
    assert read(stream) == ([*range(1, 10)], {0: "WorkerDied"})
    gate.open()
    # Those that a dead member has not begun go to the others, if there are any.
    share = zrpc.share([-1, -2, -3])
    assert zrpc.rpc_sync(group, abs, args=(share,)) == [1, 2, 3]
    assert read(zrpc.rpc_stream(group, abs, args=(share,))) == ([1, 2, 3], {})


# -- ends ------------------------------------------------------------------------------------------


def test_the_others_go_on_when_some_members_fail(caller: Mesh, gate: Gate) -> None:
    def run(place: int) -> Iterator[int]:
        yield 0
        if place == 1:
            raise LookupError(place)
        if place == 2:
            gate.wait_inside()
        yield 1

    stream = zrpc.rpc_stream(zrpc.group("*"), here(run), args=(zrpc.each(range(3)),), timeout=0.5)
    found = [next(stream) for _ in range(4)]
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    for _ in range(2):  # also when it is asked again
        with pytest.raises(zrpc.GroupError, match=r"2 of 3 members .*worker1: LookupErr") as caught:
            next(stream)
        assert [*caught.value.errors] == [1, 2]
        assert isinstance(caught.value.errors[2], zrpc.RpcTimeoutError)
        assert caught.value.results == {0: None}
        assert caught.value.executed is None
    gate.open()


def test_what_can_not_be_pickled_for_one_member_fails_for_it(caller: Mesh) -> None:
    lock = threading.Lock()
    stream = zrpc.rpc_stream(zrpc.group("*"), iterate, args=(zrpc.each([[1], lock, [3]]),))
    assert read(stream) == ([(0, 1), (2, 3)], {1: "SerializationError"})
    with pytest.raises(zrpc.SerializationError):
        zrpc.rpc_stream(zrpc.group("*"), iterate, args=(lock,))
    with pytest.raises(ValueError, match="each"):
        zrpc.rpc_stream(zrpc.group("*"), iterate, args=(zrpc.each([[1]]),))
    with pytest.raises(zrpc.OptionError, match="prefetch"):
        zrpc.rpc_stream(zrpc.group("*"), iterate, args=([1],), prefetch=0)
    with pytest.raises(zrpc.GroupError, match=r"expected a generator for rpc_stream.*rpc_sync"):
        list(zrpc.rpc_stream(zrpc.group("*"), abs, args=(1,)))


def iterate(items: Any) -> Iterator[Any]:
    yield from items


@pytest.mark.system
def test_the_time_of_members_counts_only_while_the_reader_waits(caller: Mesh, gate: Gate) -> None:
    def run(place: int) -> Iterator[Any]:
        if place:
            yield gate.wait_inside("late")
        else:
            yield from range(3)
            gate.open()

    workers = zrpc.group(["worker1", "worker2"])
    stream = zrpc.rpc_stream(workers, here(run), args=(zrpc.each(range(2)),), timeout=1, prefetch=1)
    for number in range(3):
        time.sleep(0.5)
        assert next(stream) == (0, number)
    assert list(stream) == [(1, "late")]


def test_a_deadline_holds_for_all_members(caller: Mesh) -> None:
    made, run = taps()
    stream = zrpc.rpc_stream(
        zrpc.group("*"), run, args=(zrpc.each(made),), prefetch=2, deadline=0.3
    )
    for tap in made:
        tap.await_close()
    found, errors = read(stream)
    assert len(found) <= 6
    assert errors == dict.fromkeys(range(3), "RpcTimeoutError")
