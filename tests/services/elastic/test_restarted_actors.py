"""Actors that are made again when another worker has the name of their owner."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import zrpc as rpc
from tests.services.elastic.conftest import Crew, Elastic
from tests.support.gates import Gate
from tests.support.identity import Same
from tests.support.waiting import SOON, until
from zrpc.agent.agent import Agent
from zrpc.agent.stats import take_stats
from zrpc.services.rref.service import RRefService

pytestmark = pytest.mark.system


@rpc.actor(restart=True)
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> tuple[int, int]:
        self.count += number
        return self.count, rpc.get_worker_info().incarnation

    def wait(self, gate: Gate) -> None:
        gate.wait_inside()

    def leave(self) -> None:
        rpc.RRef(self).stop()


def make(agent: Agent, *args: Any, cls: Any = Counter, **more: Any) -> Any:
    with agent.as_current():
        rref = rpc.remote("w1", cls, args, **more)
        rref.ready(SOON)
        return rref


def hand_on(rref: Any, giver: Agent, agent: Agent) -> Any:
    """Returns an RRef of another worker to the same value."""
    kept: list[Any] = []
    box = Same()
    box.keep = kept.append  # type: ignore[attr-defined]
    with giver.as_current():
        rpc.rpc_sync(agent.worker_info, lambda rref: box.keep(rref), (rref,))  # type: ignore[attr-defined]
    return kept.pop()


def error_of(call: Callable[..., Any], *args: Any) -> rpc.RpcError:
    with pytest.raises(rpc.RpcError) as caught:
        call(*args)
    return caught.value


def refusal(rref: Any, kind: type[rpc.RpcError] = rpc.RpcError) -> str:
    """Returns why an actor takes no call."""
    error = error_of(rref.rpc_sync().add, 1)
    assert isinstance(error, kind)
    assert error.executed is False
    return str(error)


def test_the_maker_makes_it_again_with_its_arguments_and_all_rrefs_mean_the_new_one(
    workers: Crew,
) -> None:
    counter = make(workers[0], 10)
    other = hand_on(counter, workers[0], workers[2])
    assert counter.rpc_sync().add(1) == (11, 0)
    for count in (1, 2):
        workers.die()
        workers.revive(count=count)
        assert other.rpc_sync().add(1) == (11, count)
        assert counter.rpc_sync().add(1) == (12, count)
        assert counter == other
        assert counter.owner().incarnation == other.owner().incarnation == count
    # Also those that are handed on now, and those that the new owner gets.
    third = hand_on(other, workers[2], workers[0])
    assert third.rpc_async().add(1).wait() == (13, 2)
    assert hand_on(other, workers[2], workers[1]).local_value().count == 13


def test_calls_that_run_or_wait_fail_and_the_next_ones_are_in_order(workers: Crew) -> None:
    counter = make(workers[0], name="steps")
    with Gate() as gate, ThreadPoolExecutor(1) as pool:
        running = counter.rpc_async(0).wait(gate)
        gate.await_entry()
        waiting = counter.rpc_async(0).add(1)
        blocking = pool.submit(counter.rpc_sync(0).add, 1)
        numbers = workers[0].service(RRefService).caller.calls
        until(lambda: len(numbers.in_flight()) == 3)
        workers.revive()
        for call in (running.wait, waiting.wait, lambda: blocking.result(SOON)):
            error = error_of(call)
            assert (type(error), error.executed) == (rpc.OwnerDied, None)
            told = "the actor Counter 'steps' on w1 is lost: worker w1 (rank 1) is gone"
            assert told in str(error)
        futures = [counter.rpc_async().add(1) for _ in range(10)]
        assert [each.wait() for each in futures] == [(n, 1) for n in range(1, 11)]


def test_calls_in_between_fail_at_once(workers: Crew) -> None:
    counter = make(workers[0])
    other = hand_on(counter, workers[0], workers[2])
    workers.die()
    for rref in (counter, other):
        for call in (rref.rpc_sync().add, lambda n, rref=rref: rref.rpc_async().add(n).wait()):
            error = error_of(call, 1)
            assert (type(error), error.executed) == (rpc.OwnerDied, False)
            assert "the actor Counter on w1 is lost: worker w1 (rank 1) is gone" in str(error)
            assert "w0 makes it again when another worker joins as w1" in str(error)
    for agent in (workers[0], workers[2]):  # nothing that a shutdown would wait for
        until(agent.service(RRefService).idle, "the references are settled")
    back = threading.Event()
    with workers[2].as_current():
        rpc.on_worker_joined(lambda worker: worker.incarnation and back.set())
        workers.revive()
        assert back.wait(SOON)
        assert other.rpc_sync().add(1) == (1, 1)


def test_it_is_not_made_again_if_the_maker_has_died_too(elastic: Elastic, workers: Crew) -> None:
    first, second = make(workers[0]), make(workers[2])
    other, another = hand_on(first, workers[0], workers[2]), hand_on(second, workers[2], workers[0])
    workers.die(0)
    assert other.rpc_sync().add(1) == (1, 0)
    workers.die(1)
    assert "the worker that made it is lost too" in str(error_of(other.rpc_sync().add, 1))
    with ThreadPoolExecutor(2) as pool:  # each waits for the other
        workers[:2] = pool.map(lambda rank: elastic.join(f"w{rank}", rank, restarts=1), range(2))
    refusal(other, rpc.OwnerDied)
    assert second.rpc_sync().add(1) == (1, 1)
    assert another is not None


@rpc.actor
class Plain(Counter):
    pass


def test_one_that_is_not_to_be_made_again_stays_lost(workers: Crew) -> None:
    foreign = make(workers[0], cls=rpc.actor(dict, restart=True))
    plain = make(workers[0], cls=Plain, name="plain")
    workers.revive()
    assert "make it again on a worker that lives" in refusal(plain, rpc.OwnerDied)
    assert foreign.rpc_sync().get("key", 1) == 1
    with workers[2].as_current(), pytest.raises(rpc.RpcTimeoutError):
        rpc.get_actor("plain", 0.1)


@pytest.mark.parametrize("stopper", [0, 2])
@pytest.mark.parametrize("between", [False, True])
def test_one_that_is_stopped_is_not_made_again(workers: Crew, stopper: int, between: bool) -> None:
    counter = make(workers[0], name="steps")
    other = hand_on(counter, workers[0], workers[2])
    to_stop = other if stopper == 2 else counter
    if between:
        workers.die()
        error = error_of(to_stop.stop)
        assert isinstance(error, rpc.OwnerDied)
        assert "makes it again when" not in str(error)
    else:
        to_stop.stop()
    workers.revive()
    lost = "the actor Counter 'steps' on w1 is lost"
    assert lost in refusal(counter, rpc.OwnerDied)
    until(lambda: lost in refusal(other), "this worker has learned that from the maker")
    with workers[2].as_current(), pytest.raises(rpc.RpcTimeoutError):
        rpc.get_actor("steps", 0.1)
    make(workers[2], 5, name="steps")


def test_one_that_stops_itself_is_not_made_again(workers: Crew) -> None:
    leaving = make(workers[0], name="steps")
    leaving.rpc_sync().leave()
    leaving.stop()  # waits for the end
    with workers[2].as_current(), pytest.raises(rpc.RpcTimeoutError):
        rpc.get_actor("steps", 0.1)
    until(lambda: "forget" in take_stats(workers[0]).handlers, "the maker has been told")
    workers.revive()
    assert "the actor Counter 'steps' on w1 is lost" in refusal(leaving, rpc.OwnerDied)


@pytest.mark.parametrize("looks_late", [False, True])
def test_the_name_means_the_new_one_although_the_maker_keeps_no_rref(
    workers: Crew, looks_late: bool
) -> None:
    """An RRef of the new one may come before its receiver has looked for it."""
    make(workers[0], 7, name="steps")
    looks = threading.Event()
    with workers[2].as_current():
        if looks_late:
            rpc.on_worker_joined(lambda _: looks.wait(SOON))  # before zrpc itself is told
        before = rpc.get_actor("steps", SOON)
        assert before.rpc_sync().add(1) == (8, 0)
        workers.die()
        workers.revive()
        again = rpc.get_actor("steps", SOON)
        assert again.rpc_sync().add(1) == (8, 1)
        assert before == again
        assert before.rpc_sync().add(1) == (9, 1)
        looks.set()
        again.stop()
    stopped = "was stopped by w2|it is not made again: it was stopped"  # before or after it looks
    assert re.search(stopped if looks_late else "was stopped by w2", refusal(before))


def test_if_another_actor_has_the_name_meanwhile_it_is_not_made_again(workers: Crew) -> None:
    counter = make(workers[0], 7, name="steps")
    workers.die()
    with workers[2].as_current():
        taken = rpc.remote("w2", Plain, (3,), name="steps")
        assert taken.rpc_sync().add(1) == (4, 0)
    workers.revive()
    assert "Counter is not made: its name 'steps' is taken" in refusal(counter)
    assert taken.rpc_sync().add(1) == (5, 0)


def test_one_that_was_refused_since_its_name_was_taken_is_not_made_later(workers: Crew) -> None:
    counter = make(workers[0], 7, name="steps")
    error = error_of(lambda: make(workers[2], 100, name="steps"))
    assert "is taken" in str(error)
    counter.stop()
    workers.die()
    workers.revive()
    assert make(workers[0], 5, name="steps").rpc_sync().add(1) == (6, 1)
    del error


def test_the_maker_s_rrefs_decide_and_nobody_waits_in_vain(workers: Crew) -> None:
    counter = make(workers[0])
    other = hand_on(counter, workers[0], workers[2])
    del counter
    service = workers[0].service(RRefService)
    until(lambda: service.stats()["rrefs_held"] == 0, "the maker's is dropped", collect=True)
    assert other.rpc_sync().add(1) == (1, 0)
    workers.revive()
    # The new owner, which does not know what it was, may be the first to say so.
    lost = "the actor Counter on w1 is lost"
    until(lambda: lost in refusal(other), "this worker has learned that from the maker")


class Broken(Exception):
    pass


@rpc.actor(restart=True)
class Fragile(Counter):
    def __init__(self, *_: Any) -> None:
        super().__init__()
        if rpc.get_worker_info().incarnation % 2:
            raise Broken


def test_if_the_constructor_fails_then_the_calls_raise_that(workers: Crew) -> None:
    fragile, named = make(workers[0], cls=Fragile), make(workers[0], cls=Fragile, name="steps")
    other = hand_on(fragile, workers[0], workers[2])
    workers.revive()
    for rref in (fragile, other, named):
        with pytest.raises(Broken):
            rref.rpc_sync().add(1)
    make(workers[2], name="steps")  # the name is free
    workers.revive(count=2)
    assert fragile.rpc_sync().add(1) == other.rpc_sync().add(0) == (1, 2)
    with workers[0].as_current():
        assert rpc.get_actor("steps", SOON).rpc_sync().add(1) == (1, 2)


@rpc.actor(restart=True)
class Needs(Counter):
    def __init__(self, other: Any) -> None:
        super().__init__()
        if not rpc.get_worker_info().incarnation:
            other.rpc_sync().add(1)


def test_a_constructor_may_fail_since_another_worker_has_died(workers: Crew) -> None:
    with workers[0].as_current():
        other = rpc.remote("w2", Plain)
        other.ready(SOON)
    workers.die(2)
    with workers[0].as_current():
        needs = rpc.remote("w1", Needs, (other,), name="steps")
    assert isinstance(error_of(needs.ready), rpc.OwnerDied)
    workers.revive(2)
    workers.revive(1)
    refusal(needs)  # it is not made again, and does not take the name again
    make(workers[0], name="steps")


def test_the_new_one_is_freed_with_the_last_rref(workers: Crew) -> None:
    counter = make(workers[0])
    other = hand_on(counter, workers[0], workers[2])
    workers.die()
    late = hand_on(counter, workers[0], workers[2])
    workers.revive()
    assert late.rpc_sync().add(1) == (1, 1)
    del counter
    assert other.rpc_sync().add(1) == (2, 1)
    del other, late
    for agent in workers:
        stats = agent.service(RRefService).stats
        until(lambda stats=stats: not any(stats().values()), str(stats), collect=True)


def test_a_creation_in_flight_is_made_again_too(workers: Crew) -> None:
    with Gate() as gate, workers[0].as_current():
        cls = rpc.actor(Opener, restart=True)
        opener = rpc.remote("w1", cls, (gate,))
        gate.await_entry()
        gate.open()
        workers.die()
        assert isinstance(error_of(opener.ready), rpc.OwnerDied)
        workers.revive()
        opener.ready(SOON)


class Opener:
    def __init__(self, gate: Gate) -> None:
        gate.wait_inside()


def test_a_group_of_actors_is_made_again_member_by_member(workers: Crew) -> None:
    with workers[0].as_current():
        counters = rpc.remote(rpc.group("w*"), Counter, args=(rpc.each([10, 20, 30]),))
        assert [count for count, _ in counters.rpc_sync().add(1)] == [11, 21, 31]
        workers.revive()
        assert counters.rpc_sync().add(1) == [(12, 0), (21, 1), (32, 0)]
