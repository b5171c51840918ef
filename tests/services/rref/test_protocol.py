"""The reference count against a network that reorders, repeats, and loses workers."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.rref.simulation import (
    ORDINARY,
    WITH_BREAKS,
    WITH_LOSSES,
    WITH_PARTITIONS,
    Network,
    Packet,
    run,
    schedules,
)
from zrpc.errors import ProtocolError
from zrpc.services.rref.messages import Fork, GloballyUniqueId, ReferenceMessage, Verb
from zrpc.services.rref.protocol import References
from zrpc.services.rref.records import Serials

thorough = settings(max_examples=250)
SIZES = st.integers(3, 5)
SEEDS = st.integers(0, 2**16)

# -- the properties ------------------------------------------------------------------------


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(ORDINARY), seed=SEEDS)
def test_values_live_as_long_as_references_whatever_the_order(
    size: Any, schedule: Any, seed: Any
) -> None:
    run(size, schedule, seed)


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(WITH_LOSSES), seed=SEEDS)
def test_nothing_is_kept_for_the_dead_and_nothing_taken_from_the_living(
    size: Any, schedule: Any, seed: Any
) -> None:
    run(size, schedule, seed)


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(WITH_PARTITIONS), seed=SEEDS)
def test_nothing_is_kept_when_workers_that_live_lose_each_other(
    size: Any, schedule: Any, seed: Any
) -> None:
    run(size, schedule, seed)


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(WITH_BREAKS), seed=SEEDS)
def test_nothing_is_kept_when_connections_break(size: Any, schedule: Any, seed: Any) -> None:
    run(size, schedule, seed)


def test_an_owner_forgets_a_fork_that_only_a_worker_that_lost_it_had_named() -> None:
    hand_on = [("hand on", 10, 9), ("deliver", 0, 8), ("hand on", 1, 9), ("deliver", 6, 6)]
    more = [("create", 7, 11), ("hand on", 6, 9), ("drop", 11, 3), ("hand on", 2, 4)]
    end = [("drop", 7, 11), ("deliver", 9, 1), ("hand on", 11, 0), ("deliver", 11, 7)]
    cut = [("deliver", 10, 6), ("part", 10, 3), ("deliver", 0, 11)]
    run(3, [("create", 2, 2), *hand_on, *more, *end, *cut], 1826)


# -- sequences that once went wrong --------------------------------------------------------


def finish(network: Network) -> None:
    for seed in range(20):
        copied = copy.deepcopy(network)
        copied.finish(random.Random(seed))


def only(network: Network, kind: str, to: int) -> Packet:
    [packet] = [p for p in network.under_way if (p.kind, p.to) == (kind, to)]
    return packet


def test_a_fork_arrives_when_its_owner_is_known_to_be_gone() -> None:
    network = Network(3)
    network.create(0, 1)
    network.hand_on(network.handles[0], 2)
    network.kill(1)
    network.notice(2, 1)
    network.deliver(only(network, "fork", 2))
    assert network.machines[2].idle
    finish(network)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_fork_is_handed_on_when_its_owner_or_receiver_is_known_to_be_gone(gone: int) -> None:
    network = Network(3)
    network.create(0, 1)
    network.kill(gone)
    network.notice(0, gone)
    network.hand_on(network.handles[0], 2)
    assert network.machines[0].idle
    finish(network)


@pytest.mark.parametrize("noticed_first", [True, False])
def test_a_message_to_the_dead_is_taken_back_at_the_owner(noticed_first: bool) -> None:
    network = Network(2)
    network.create(0, 0)
    network.kill(1)
    if noticed_first:
        network.notice(0, 1)
    network.hand_on(network.handles[0], 1, cancelled=True)
    finish(network)


def test_a_late_word_from_the_dead_keeps_nothing() -> None:
    network = Network(3)
    network.create(0, 1)
    network.deliver(only(network, "create", 1))
    network.hand_on(network.handles[0], 2)
    network.deliver(only(network, "fork", 2))
    network.kill(2)
    network.notice(0, 2)
    network.drop(network.handles[0])
    delete, add = (
        next(p for p in network.under_way if (p.kind, p.sender) == ("message", sender))
        for sender in (0, 2)
    )
    network.deliver(delete)
    network.deliver(add)
    finish(network)


def test_an_end_that_comes_before_its_beginning() -> None:
    owner = References(0)
    rref_id, fork_id = GloballyUniqueId(1, 0), GloballyUniqueId(1, 1)
    owner.handle(1, ReferenceMessage(Verb.DELETE, 0, rref_id, fork_id))
    owner.look()
    assert owner.freed == []
    assert sum(owner.sizes()) == 1
    owner.add(rref_id, fork_id, 1)
    owner.look()
    assert owner.freed == [rref_id]
    assert sum(owner.sizes()) == 0


def test_a_child_that_is_heard_of_before_its_parent() -> None:
    owner = References(0)
    rref_id, parent, child = (GloballyUniqueId(1, number) for number in range(3))
    owner.handle(2, ReferenceMessage(Verb.ADD, 0, rref_id, child, parent))
    owner.handle(2, ReferenceMessage(Verb.DELETE, 1, rref_id, child))
    owner.look()
    assert owner.freed == []  # the parent lives: its beginning is under way
    owner.add(rref_id, parent, 1)
    owner.look()
    assert owner.freed == []
    owner.handle(1, ReferenceMessage(Verb.DELETE, 0, rref_id, parent))
    owner.look()
    assert owner.freed == [rref_id]


# -- a value that is made again by another owner -------------------------------------------

MAKER, OLD, USER, OTHER, NEW = range(5)


@pytest.mark.system
@settings(max_examples=100)
@given(data=st.data())
def test_a_value_that_is_made_again_lives_as_long_as_the_forks_there_were(data: Any) -> None:
    members = {member: References(member) for member in (MAKER, USER, OTHER, NEW)}
    rref_id, created = GloballyUniqueId(MAKER, 0), GloballyUniqueId(MAKER, 1)
    forks = {MAKER: GloballyUniqueId(MAKER, 2)}
    members[MAKER].create(rref_id, forks[MAKER], OLD)
    for user in (USER, OTHER):
        forks[user] = GloballyUniqueId(MAKER, 10 + user)
        members[user].receive(Fork(rref_id, forks[user], OLD, forks[MAKER]), MAKER)
    for user in forks:
        members[user].on_member_lost(OLD)
        members[user].outgoing.clear()
    # What each does in its order, and what is in flight; both in any order.
    steps = {user: ["move", "drop"] for user in forks}
    steps[NEW] = ["create", "end of the first fork"]
    flight: list[tuple[int, int, ReferenceMessage]] = []
    listed: set[GloballyUniqueId] = set()
    ended: set[GloballyUniqueId] = set()
    while flight or any(steps.values()):
        events = [(who, None) for who, left in steps.items() if left]
        events += [(None, each) for each in flight]
        who, packet = data.draw(st.sampled_from(events))
        if packet is not None:
            flight.remove(packet)
            sender, to, message = packet
            members[to].handle(sender, message)
            if to == NEW:  # the end of a fork may come before its beginning
                ended |= {message.fork_id} if message.verb is Verb.DELETE else set()
                listed = (listed | {message.fork_id}) - ended
        elif (step := steps[who].pop(0)) == "move":
            members[who].move({rref_id: NEW})
        elif step == "drop":
            members[who].drop(forks[who])
        elif step == "create":
            members[MAKER].create(rref_id, created, NEW)
            members[NEW].add(rref_id, created, MAKER)
            members[MAKER].on_listed(created)
            listed.add(created)
        else:
            members[MAKER].drop(created)
        for member, references in members.items():
            references.look()
            flight += [(member, to, message) for to, message in references.outgoing]
            references.outgoing.clear()
            assert all(to in members for _, to, _ in flight), "a message to somebody unknown"
        if listed:
            assert sum(members[NEW].sizes()) == 1, "freed while a fork is listed"
    for member, references in members.items():
        assert (sum(references.sizes()), references.idle) == (0, True), member
    assert set(members[NEW].freed) == {rref_id}


# -- the bytes -----------------------------------------------------------------------------

RANKS = st.integers(0, 2**32 - 1)
LOCALS = st.integers(0, 2**64 - 1)
IDS = st.builds(GloballyUniqueId, RANKS, LOCALS)
MESSAGES = st.builds(ReferenceMessage, st.sampled_from(Verb), LOCALS, IDS, IDS, IDS)


@pytest.mark.system
@given(st.lists(MESSAGES), st.lists(st.builds(Fork, IDS, IDS, RANKS, IDS)))
def test_messages_and_forks_survive_as_bytes(messages: Any, forks: Any) -> None:
    data = b"".join(message.pack() for message in messages)
    assert ReferenceMessage.parse_all(data) == messages
    assert Fork.unpack_all(b"".join(fork.pack() for fork in forks)) == forks


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: Any) -> None:
    for parse in (ReferenceMessage.parse_all, Fork.unpack_all):
        try:
            found = parse(data)
        except ProtocolError:
            continue
        assert b"".join(each.pack() for each in found) == data


def pair_with_fork() -> tuple[References, Fork]:
    """A user that holds a fork of rank 0's."""
    user, fork = References(1), Fork(GloballyUniqueId(0, 1), GloballyUniqueId(0, 2), 0)
    user.receive(fork, 0)
    return user, fork


def test_the_last_message_is_sent_again_if_it_is_known_to_be_lost() -> None:
    user, fork = pair_with_fork()
    owner = References(0)
    owner.add(fork.rref_id, fork.fork_id, 1)
    user.drop(fork.fork_id)
    user.look()
    user.outgoing.clear()
    owner.on_messages_lost(1)
    for sender, receiver in ((owner, user), (user, owner)):
        for _, message in sender.outgoing:
            receiver.handle(0 if sender is owner else 1, message)
        receiver.look()
    assert owner.freed == [fork.rref_id]
    owner.on_member_lost(1)
    owner.outgoing.clear()
    owner.on_messages_lost(1)
    assert owner.outgoing == []


def test_a_fork_that_comes_twice_ends_with_its_last_handle() -> None:
    user, fork = pair_with_fork()
    user.receive(fork, 0)
    user.drop(fork.fork_id)
    user.look()
    assert user.outgoing == []
    user.drop(fork.fork_id)
    user.look()
    assert [(to, message.verb) for to, message in user.outgoing] == [(0, Verb.DELETE)]
    assert sum(user.sizes()) == 0


def test_a_fork_is_not_moved_to_a_worker_that_is_lost_too() -> None:
    user, fork = pair_with_fork()
    user.on_member_lost(0)
    user.on_member_lost(2)
    for owner in (0, 2):
        user.move({fork.rref_id: owner})
        assert user.outgoing == []
        assert user.idle
    user.move({fork.rref_id: 3})
    assert [(to, message.verb) for to, message in user.outgoing] == [(3, Verb.ADD)]
    user.move({fork.rref_id: 3})
    assert len(user.outgoing) == 1
    assert not user.idle
    user.on_member_lost(3)
    assert user.idle


def test_a_fork_that_comes_again_after_its_end_is_none() -> None:
    user, fork = pair_with_fork()
    user.drop(fork.fork_id)
    user.look()
    before = list(user.outgoing)
    user.receive(fork, 0)
    user.drop(fork.fork_id)
    assert user.outgoing == before
    assert sum(user.sizes()) == 0
    # Not for ever: it is forgotten after many others.
    for number in range(300):
        other = Fork(GloballyUniqueId(0, 1), GloballyUniqueId(0, 3 + number), 0)
        user.receive(other, 0)
        user.drop(other.fork_id)
        user.look()
    user.receive(fork, 0)
    assert sum(user.sizes()) == 1


def test_what_is_known_does_not_grow_after_a_message_is_lost() -> None:
    """The others are admitted once each, however late within some bounds."""
    serials, total = Serials(), 40_000
    lost = {3, 11, 12}
    numbers = [number for number in range(total) if number not in lost]
    numbers[50], numbers[55] = numbers[55], numbers[50]
    for number in numbers:
        assert not serials.seen(number)
        serials.admit(number)
        assert len(serials.ahead) <= 1 << 14
    assert (serials.next, serials.ahead) == (total, set())
    assert all(map(serials.seen, range(total)))


def count_messages(network: Network) -> Counter[int]:
    """Delivers everything in order; returns how many messages of the protocol each worker sent."""
    sent: Counter[int] = Counter()
    while network.under_way:
        packet = network.under_way[0]
        sent[packet.sender] += packet.kind == "message"
        network.deliver(packet)
    return sent


def test_256_members_share_a_reference_with_few_messages() -> None:
    """The owner gives it to the first user, and that one to all others."""
    network = Network(256)
    network.create(0, 0)
    network.hand_on(network.handles[0], 1)
    assert count_messages(network).total() == 0  # the owner knows of the fork that it has made
    [_, first] = network.handles
    for to in range(2, 256):
        network.hand_on(first, to)
    sent = count_messages(network)
    assert sent[0] == 2 * 254  # the owner tells both the user and the one that gave it
    assert sent[1] == 0
    assert {sent[rank] for rank in range(2, 256)} == {1}
    for handle in list(network.handles):
        network.drop(handle)
    sent = count_messages(network)
    assert sent[0] == 0
    assert {sent[rank] for rank in range(1, 256)} == {1}
    assert network.freed.total() == 1
