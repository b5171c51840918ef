"""Streams of groups: the items of all members as they come, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

import zrpc
from tests.services.elastic.conftest import elastic, events  # noqa: F401
from tests.services.groups.test_memory import Picky
from tests.services.streams.conftest import Tap
from tests.services.streams.test_ends import WAYS
from tests.services.streams.test_items import count, mesh_is_empty
from tests.support.gates import Gate
from tests.support.identity import here
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh, local_mesh

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

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

    @zrpc.functions.async_execution
    def length_later(self, prompt: Any) -> Any:
        return zrpc.rpc_async(0, len, args=(prompt,))


# -- items -----------------------------------------------------------------------------------------


def test_all_items_come_with_their_places(joined: Mesh) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), count, args=(zrpc.each([300, 0, 200]),), prefetch=7)
    found: dict[int, list[int]] = {0: [], 2: []}
    for place, item in stream:
        found[place].append(item)
    assert found == {0: [*range(300)], 2: [*range(200)]}
    assert mesh_is_empty(joined)


@pytest.mark.parametrize("method", ["generate", "generate_in_loop"])
@pytest.mark.parametrize("actor", [False, True])
def test_methods_of_references_are_streamed(joined: Mesh, method: str, actor: bool) -> None:
    models = zrpc.remote(zrpc.group("*"), zrpc.actor(Model) if actor else Model)
    stream = getattr(models.rpc_stream(prefetch=1), method)
    assert sorted(stream(zrpc.split([1, 2, 3, 4]))) == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert sorted(getattr(models[1:].rpc_stream(), method)("a")) == [(0, "a"), (1, "a")]
    assert list(getattr(models[:0].rpc_stream(), method)("a")) == []
    assert "generate" in repr(stream([]))
    assert mesh_is_empty(joined)


def test_what_goes_to_all_is_packed_once(joined: Mesh) -> None:
    Picky.packed = 0
    assert len(list(zrpc.rpc_stream(zrpc.group("*"), count, args=(2,), kwargs={}))) == 6
    stream = zrpc.rpc_stream(zrpc.group("*"), lambda n, _: count(n), args=(2, [Picky()]))
    assert len(list(stream)) == 6
    assert Picky.packed == 1


def test_a_member_that_makes_nothing_holds_up_no_other(joined: Mesh, gate: Gate) -> None:
    def run(slow: bool) -> Iterator[Any]:
        yield gate.wait_inside("slow") if slow else "quick"

    stream = zrpc.rpc_stream(zrpc.group("*"), here(run), args=(zrpc.each([True, False, False]),))
    assert sorted([next(stream), next(stream)]) == [(1, "quick"), (2, "quick")]
    gate.open()
    assert list(stream) == [(0, "slow")]


def test_members_take_turns(joined: Mesh) -> None:
    made, run = taps()
    with zrpc.rpc_stream(zrpc.group("*"), run, args=(zrpc.each(made),), prefetch=4) as stream:
        for tap in made:
            tap.await_made(4)
        until(lambda: zrpc.stats().calls_in_flight == 3)
        places = Counter(place for place, _ in (next(stream) for _ in range(30)))
        assert set(places) == {0, 1, 2}


def test_each_member_is_at_most_so_far_ahead(joined: Mesh) -> None:
    made, run = taps()
    stream = zrpc.rpc_stream(zrpc.group("*"), run, args=(zrpc.each(made),), prefetch=3)
    taken = Counter({0: 0, 1: 0, 2: 0})
    for _ in range(40):
        place, _ = next(stream)
        taken[place] += 1
        assert all(tap.made <= taken[each] + 3 + 1 for each, tap in enumerate(made))
    for place, tap in enumerate(made):
        tap.await_made(taken[place] + 2)
    stream.close()
    assert mesh_is_empty(joined)


def test_a_stream_of_a_group_can_be_read_in_an_event_loop(joined: Mesh, gate: Gate) -> None:
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
    assert mesh_is_empty(joined)


def test_several_threads_share_the_items_of_a_group(joined: Mesh) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), count, args=(300,), prefetch=5)
    found: list[Any] = []

    def take() -> None:
        with joined.agent(0).as_current():
            while (item := next(stream, None)) is not None:
                found.append(item)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert sorted(found) == [(p, i) for p in range(3) for i in range(300)]


# -- share -----------------------------------------------------------------------------------------

PROMPTS = ["a", "bc", "", "def"]


@pytest.mark.parametrize("method", ["length", "length_in_loop", "length_later"])
@pytest.mark.parametrize("actor", [False, True])
def test_plain_results_of_shared_items_come_alone(joined: Mesh, method: str, actor: bool) -> None:
    models = zrpc.remote(zrpc.group("*"), zrpc.actor(Model) if actor else Model)
    stream = getattr(models.rpc_stream(), method)
    assert sorted(stream(zrpc.share(PROMPTS * 5))) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert list(stream(zrpc.share([]))) == []
    assert mesh_is_empty(joined)


@pytest.mark.parametrize("method", ["generate", "generate_in_loop"])
def test_items_of_generators_come_with_the_place_of_the_shared_item(
    joined: Mesh, method: str
) -> None:
    models = zrpc.remote(zrpc.group("*"), Model)
    stream = getattr(models.rpc_stream(), method)(zrpc.share(PROMPTS))
    assert sorted(stream) == [(0, "a"), (1, "b"), (1, "c"), (3, "d"), (3, "e"), (3, "f")]
    assert mesh_is_empty(joined)


def test_batched_functions_are_shared(joined: Mesh) -> None:
    @zrpc.batched(max_size=2, max_wait=0)
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    stream = zrpc.rpc_stream(zrpc.group("*"), double, args=(zrpc.share(range(5)),))
    assert sorted(stream) == [0, 2, 4, 6, 8]


def test_none_is_a_result_too(joined: Mesh) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), print, args=(zrpc.share([""]),), kwargs={"end": ""})
    assert list(stream) == [None]


def test_results_come_as_they_are_ready(joined: Mesh, gate: Gate) -> None:
    def work(item: int) -> int:
        return gate.wait_inside(item) if item == 0 else item

    stream = zrpc.rpc_stream(zrpc.group("worker[12]"), here(work), args=(zrpc.share(range(8)),))
    assert [next(stream) for _ in range(7)] == [*range(1, 8)]
    gate.open()
    assert list(stream) == [0]


def test_a_member_is_at_most_one_item_ahead_of_a_slow_reader(joined: Mesh) -> None:
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


def test_shared_items_that_fail(joined: Mesh) -> None:
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


def test_closing_gives_out_no_more_items(joined: Mesh, gate: Gate) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), gate.wait_inside, args=(zrpc.share(range(9)),))
    gate.await_entry(3)
    stream.close()
    gate.open()
    assert list(stream) == []
    assert mesh_is_empty(joined)
    assert not gate.entered.acquire(timeout=0.05)


def test_the_items_of_a_member_that_dies_go_to_the_others(joined: Mesh, gate: Gate) -> None:
    def work(item: int) -> int:
        if zrpc.get_worker_info().name == "worker1":
            gate.wait_inside()
        return item

    group = zrpc.group("worker[12]")
    stream = zrpc.rpc_stream(group, here(work), args=(zrpc.share(range(10)),))
    gate.await_entry()
    joined.agent(1).close()
    assert read(stream) == ([*range(1, 10)], {0: "WorkerDied"})
    gate.open()
    # What nobody has begun, since no member is left, fails with executed=False.
    joined.agent(2).close()
    models = zrpc.group([zrpc.remote("worker0", Model)])
    assert sorted(models.rpc_stream().length(zrpc.share(["a", "b"]))) == [1, 1]


@pytest.mark.system
def test_a_worker_that_joins_takes_items_of_a_stream(elastic: Elastic, gate: Gate) -> None:  # noqa: F811
    def work(item: int) -> str:
        name = zrpc.get_worker_info().name
        return gate.wait_inside(name) if item == 0 else name

    first, _ = elastic.join_all(2)
    with first.as_current():
        group = zrpc.group("w[1-9]", live=True)
        stream = zrpc.rpc_stream(group, here(work), args=(zrpc.share(range(5)),))
        gate.await_entry()
        elastic.join("w4")
        assert [next(stream) for _ in range(4)] == ["w4"] * 4
        gate.open()
        assert list(stream) == ["w1"]
        # Without share, those that match when the stream begins.
        assert {place for place, _ in zrpc.rpc_stream(group, count, args=(1,))} == {0, 1}


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", WAYS)
def test_all_generators_are_closed_when_the_reader_leaves(
    joined: Mesh, leave: Callable[[Any], None]
) -> None:
    made, run = taps()
    stream = zrpc.rpc_stream(zrpc.group("*"), run, args=(zrpc.each(made),), prefetch=3)
    for tap in made:
        tap.await_made(3)
    leave(stream)
    for tap in made:
        tap.await_close()
    assert list(stream) == []
    assert mesh_is_empty(joined)


def test_all_generators_are_closed_when_the_stream_is_dropped(joined: Mesh) -> None:
    made, run = taps()
    stream = zrpc.rpc_stream(zrpc.group("*"), run, args=(zrpc.each(made),), prefetch=3)
    for tap in made:
        tap.await_made(1)  # one that has not begun never runs
    next(stream)
    del stream
    for tap in made:
        tap.await_close()
    gc.collect()
    assert mesh_is_empty(joined)


def test_the_others_go_on_when_some_members_fail(joined: Mesh) -> None:
    def run(place: int) -> Iterator[int]:
        yield 0
        if place == 1:
            raise LookupError(place)
        yield 1

    stream = zrpc.rpc_stream(zrpc.group("*"), run, args=(zrpc.each(range(3)),))
    found = [next(stream) for _ in range(5)]
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    for _ in range(2):  # also when it is asked again
        with pytest.raises(
            zrpc.GroupError, match=r"1 of 3 members .*worker1: LookupError"
        ) as caught:
            next(stream)
        assert [*caught.value.errors] == [1]
        assert caught.value.results == {0: None, 2: None}
        assert caught.value.executed is None
    assert mesh_is_empty(joined)


def test_a_plain_function_without_share_is_refused(joined: Mesh) -> None:
    with pytest.raises(zrpc.GroupError, match=r"expected a generator for rpc_stream.*rpc_sync"):
        list(zrpc.rpc_stream(zrpc.group("*"), abs, args=(1,)))


def test_what_can_not_be_pickled_for_one_member_fails_for_it(joined: Mesh) -> None:
    lock = threading.Lock()
    stream = zrpc.rpc_stream(zrpc.group("*"), iterate, args=(zrpc.each([[1], lock, [3]]),))
    assert read(stream) == ([(0, 1), (2, 3)], {1: "SerializationError"})
    with pytest.raises(zrpc.SerializationError):
        zrpc.rpc_stream(zrpc.group("*"), iterate, args=(lock,))
    with pytest.raises(ValueError, match="each"):
        zrpc.rpc_stream(zrpc.group("*"), iterate, args=(zrpc.each([[1]]),))
    with pytest.raises(zrpc.OptionError, match="prefetch"):
        zrpc.rpc_stream(zrpc.group("*"), iterate, args=([1],), prefetch=0)
    assert mesh_is_empty(joined)


def iterate(items: Any) -> Iterator[Any]:
    yield from items


def test_the_death_of_one_producer_leaves_the_others(joined: Mesh, gate: Gate) -> None:
    def run(place: int) -> Iterator[Any]:
        yield 0
        if place == 1:
            gate.wait_inside()
        yield 1

    stream = zrpc.rpc_stream(zrpc.group("*"), here(run), args=(zrpc.each(range(3)),))
    found = [next(stream) for _ in range(5)]
    gate.await_entry()
    joined.agent(1).close()
    assert read(stream) == ([], {1: "WorkerDied"})
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    gate.open()


def test_an_item_that_takes_too_long_ends_the_stream_of_its_member(
    joined: Mesh, gate: Gate
) -> None:
    def run(place: int) -> Iterator[int]:
        yield 0
        if place == 1:
            gate.wait_inside()
        yield 1

    stream = zrpc.rpc_stream(zrpc.group("*"), here(run), args=(zrpc.each(range(3)),), timeout=0.3)
    found, errors = read(stream)
    assert found == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert errors == {1: "RpcTimeoutError"}
    gate.open()
    assert mesh_is_empty(joined)


@pytest.mark.system
def test_the_time_of_members_counts_only_while_the_reader_waits(joined: Mesh) -> None:
    stream = zrpc.rpc_stream(zrpc.group("*"), count, args=(3,), timeout=1.5, prefetch=1)
    for _ in range(4):
        time.sleep(0.5)
        next(stream)
    assert len(list(stream)) == 5


def test_a_deadline_holds_for_all_members(joined: Mesh) -> None:
    made, run = taps()
    stream = zrpc.rpc_stream(
        zrpc.group("*"), run, args=(zrpc.each(made),), prefetch=2, deadline=0.3
    )
    for tap in made:
        tap.await_close()
    found, errors = read(stream)
    assert len(found) <= 6
    assert errors == dict.fromkeys(range(3), "RpcTimeoutError")
    assert mesh_is_empty(joined)


@pytest.mark.system
@pytest.mark.parametrize("poll", [False, True])
def test_a_group_that_nobody_reads_ends_when_all_workers_shut_down(
    joined: Mesh, poll: bool
) -> None:
    async def give_up(stream: Any) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(anext(stream), 0.05)

    with local_mesh(3) as mesh:
        made, gate, agent = [Tap(length=1) for _ in range(3)], Gate(), mesh.agent(0)

        def run(tap: Tap) -> Iterator[Any]:
            yield from tap.run()
            gate.wait_inside()

        with mesh.agent(0).as_current():
            stream = zrpc.rpc_stream(zrpc.group("*"), here(run), args=(zrpc.each(made),))
            if poll:
                asyncio.run(give_up(stream))
            else:
                next(stream)
            gate.await_entry(3)
        shutdown = threading.Thread(target=mesh.shutdown)
        shutdown.start()
        until(lambda: not agent.caller.calls.in_flight())
        gate.open()
        shutdown.join(SOON)
        assert set(read(stream)[1].values()) == {"NotInitializedError"}
