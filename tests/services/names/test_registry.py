"""Names against a network that reorders, repeats and loses messages, and workers that die."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.names.simulation import ALL, DEPOSED, WITHOUT_LOSSES, World, run, schedules
from zrpc.errors import ProtocolError
from zrpc.services.names.messages import Ask, Collect, Held, Lose, Naming, Report, parse
from zrpc.wire.member_id import MemberId

thorough = settings(max_examples=300)
SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 2**16)


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(ALL), seed=SEEDS)
def test_a_name_has_one_holder_and_every_claim_ends(size: Any, schedule: Any, seed: Any) -> None:
    run(size, schedule, seed)


@pytest.mark.system
@settings(max_examples=100)  # of long schedules
@given(size=st.integers(3, 6), schedule=schedules(DEPOSED, 100), seed=SEEDS)
def test_a_name_has_one_holder_as_arbiters_die(size: Any, schedule: Any, seed: Any) -> None:
    run(size, schedule, seed)


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(WITHOUT_LOSSES[:-1]), seed=SEEDS)
def test_one_claim_is_granted_and_the_others_know(size: Any, schedule: Any, seed: Any) -> None:
    world = run(size, schedule, seed)
    names = [name for name, _ in world.grants]
    assert len(names) == len(set(names))
    assert world.ended_claims == sum(kind == "claim" for kind, _, _ in schedule)


# -- the order of events that each rule is for ---------------------------------------------


def mesh_of(size: int) -> World:
    world = World()
    for number in range(size):
        world.add(MemberId(number), map(MemberId, range(size)))
    return world


def deliver(world: World, *kinds: type) -> None:
    """Delivers the messages of these kinds, and those that they lead to."""
    while packets := [each for each in world.packets if isinstance(each.message, kinds)]:
        world.packets.remove(packets[0])
        world.deliver(packets[0])


ON_THE_WAY = Ask, Collect, Report
TO_THE_END = *ON_THE_WAY, Held


def test_a_grant_of_an_arbiter_that_has_died_is_not_accepted_in_a_later_term() -> None:
    world = mesh_of(3)
    world.claim(MemberId(2), "a")
    deliver(world, *ON_THE_WAY)  # worker 0 has granted it, and its answer is in flight
    world.kill(MemberId(0))
    world.notice(MemberId(1), MemberId(0))
    world.claim(MemberId(1), "a")
    deliver(world, *ON_THE_WAY)
    assert world.holders("a") == [1]
    deliver(world, Held)
    assert world.holders("a") == [1]
    world.finish(random.Random(0))
    assert world.holders("a") == [1]


def test_an_arbiter_answers_nothing_before_it_has_heard_all_that_live() -> None:
    world = mesh_of(3)
    world.claim(MemberId(2), "a")
    deliver(world, *TO_THE_END)
    assert world.holders("a") == [2]
    world.kill(MemberId(0))
    world.notice(MemberId(1), MemberId(0))
    world.claim(MemberId(1), "a")
    deliver(world, Ask, Report, Held)  # but no Collect
    assert world.ended_claims == 1
    world.finish(random.Random(0))
    assert (world.holders("a"), world.ended_claims) == ([2], 2)


def test_an_arbiter_asks_a_worker_that_is_about_to_join() -> None:
    world = mesh_of(2)
    world.claim(MemberId(0), "b")
    deliver(world, *TO_THE_END)
    world.begin_join(MemberId(7))
    world.members[MemberId(0)].known.add(MemberId(7))
    world.claim(MemberId(1), "a")
    deliver(world, Ask, Report, Held)
    assert world.holders("a") == []
    deliver(world, Collect, Report, Held)
    assert world.holders("a") == [1]


def test_a_worker_with_a_lower_id_that_joins_does_not_depose_the_arbiter() -> None:
    world = World()
    for number in (5, 6):
        world.add(MemberId(number), [MemberId(5), MemberId(6)])
    world.claim(MemberId(6), "a")
    deliver(world, *TO_THE_END)
    world.begin_join(MemberId(2))
    world.find(force=True)
    world.claim(MemberId(2), "a")
    world.finish(random.Random(0))
    assert world.holders("a") == [6]
    assert world.term.arbiter == 5
    world.claim(MemberId(6), "b")
    assert [packet.to for packet in world.packets] == [5]  # not by the other one


def test_two_workers_that_lose_each_other_leave_one_holder_where_both_are_seen() -> None:
    world = mesh_of(3)
    world.claim(MemberId(2), "a")
    deliver(world, *TO_THE_END)
    world.parted = True
    for at, gone in ((0, 2), (2, 0)):  # both live
        member = world.members[MemberId(at)]
        member.known.discard(MemberId(gone))
        member.found.discard(MemberId(gone))
        member.registry.on_member_lost(MemberId(gone))
    world.claim(MemberId(0), "a")  # worker 2 is dead for it
    assert world.holders("a") == [0, 2]
    world.claim(MemberId(2), "b")  # it can't ask worker 0: worker 1 becomes the arbiter
    deliver(world, *TO_THE_END, Lose)
    assert (world.holders("a"), world.holders("b")) == ([0], [2])
    assert world.members[MemberId(2)].registry.lost == [("a", 1)]


def test_a_claim_that_was_dropped_frees_the_name_when_it_is_granted() -> None:
    world = mesh_of(2)
    registry = world.members[MemberId(1)].registry
    number = registry.ask("a", claims=True)
    world.settle(MemberId(1))
    registry.free("a", number)
    world.finish(random.Random(0))
    assert world.holders("a") == []
    world.claim(MemberId(0), "a")
    world.finish(random.Random(0))
    assert world.holders("a") == [0]


def test_what_is_no_message_about_names_is_refused() -> None:
    few = b"", b"[]", b"[9]", b"[0, 1]", b"{}", b"[5, 3]", b"\xff", b'[2, "a"]'
    for data in (*few, b"[" * 100000):
        with pytest.raises(ProtocolError, match="expected a message about names"):
            parse(data)
        with pytest.raises(ProtocolError, match="expected the name of an actor"):
            Naming.parse(data)
