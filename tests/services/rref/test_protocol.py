"""The reference count against a network that reorders, repeats, and loses workers."""

from __future__ import annotations

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
    run,
    schedules,
)
from zrpc.errors import ProtocolError
from zrpc.services.rref.messages import Fork, GloballyUniqueId, ReferenceMessage, Verb
from zrpc.services.rref.protocol import References
from zrpc.services.rref.records import Serials

# -- the properties ------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("steps", [ORDINARY, WITH_LOSSES, WITH_PARTITIONS, WITH_BREAKS])
@settings(max_examples=250)
@given(data=st.data(), size=st.integers(3, 5), seed=st.integers(0, 2**16))
def test_values_live_as_long_as_references_and_nothing_is_kept(
    steps: Any, data: Any, size: Any, seed: Any
) -> None:
    run(size, data.draw(schedules(steps)), seed)


def test_an_owner_forgets_a_fork_that_only_a_worker_that_lost_it_had_named() -> None:
    hand_on = [("hand on", 10, 9), ("deliver", 0, 8), ("hand on", 1, 9), ("deliver", 6, 6)]
    more = [("create", 7, 11), ("hand on", 6, 9), ("drop", 11, 3), ("hand on", 2, 4)]
    end = [("drop", 7, 11), ("deliver", 9, 1), ("hand on", 11, 0), ("deliver", 11, 7)]
    cut = [("deliver", 10, 6), ("part", 10, 3), ("deliver", 0, 11)]
    run(3, [("create", 2, 2), *hand_on, *more, *end, *cut], 1826)


# -- the bytes -----------------------------------------------------------------------------


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


def test_a_fork_that_comes_twice_ends_with_its_last_handle_and_after_that_is_none() -> None:
    user, fork = pair_with_fork()
    user.receive(fork, 0)
    user.drop(fork.fork_id)
    user.look()
    assert user.outgoing == []
    user.drop(fork.fork_id)
    user.look()
    assert [(to, message.verb) for to, message in user.outgoing] == [(0, Verb.DELETE)]
    user.receive(fork, 0)
    user.drop(fork.fork_id)
    assert len(user.outgoing) == 1
    assert sum(user.sizes()) == 0
    # It is forgotten after many others.
    for number in range(300):
        other = fork._replace(fork_id=GloballyUniqueId(0, 3 + number))
        user.receive(other, 0)
        user.drop(other.fork_id)
        user.look()
    user.receive(fork, 0)
    assert sum(user.sizes()) == 1


def test_only_a_message_that_a_handler_may_wait_for_is_urgent() -> None:
    user, fork = pair_with_fork()
    user.drop(fork.fork_id)
    user.look()
    assert [message.verb for _, message in user.outgoing] == [Verb.DELETE]
    assert not user.urgent
    given = Fork(fork.rref_id, GloballyUniqueId(2, 1), 0, GloballyUniqueId(2, 2))
    user.receive(given, 2)
    assert user.urgent  # its owner must list it before a handler begins
    owner = References(0)
    owner.receive(given, 2)
    assert [message.verb for _, message in owner.outgoing] == [Verb.ADDED]
    assert not owner.urgent
    owner.handle(1, user.outgoing[-1][1])
    assert owner.urgent


def test_a_fork_is_not_moved_to_a_worker_that_is_lost_too() -> None:
    user, fork = pair_with_fork()
    user.on_member_lost(0)
    user.on_member_lost(2)
    for owner in (0, 2):
        user.move({fork.rref_id: owner})
        assert user.outgoing == []
        assert user.idle
    assert user.is_listed(fork.fork_id)
    user.move({fork.rref_id: 3})
    assert not user.is_listed(fork.fork_id)  # by its new owner
    assert [(to, message.verb) for to, message in user.outgoing] == [(3, Verb.ADD)]
    user.move({fork.rref_id: 3})
    assert len(user.outgoing) == 1
    assert not user.idle
    user.on_member_lost(3)
    assert user.idle


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


# -- forks that are lost with calls and answers --------------------------------------------

GIVER, ASKED = 0, 1


def exchange(giver: References, user: References) -> list[Verb]:
    """Delivers what both have to say, until they say no more; returns what was said."""
    said = []
    while giver.outgoing or user.outgoing:
        for machine, other, rank in ((giver, user, GIVER), (user, giver, ASKED)):
            for _, message in machine.outgoing:
                said.append(message.verb)
                other.handle(rank, message)
            machine.outgoing.clear()
            other.look()
    return said


def asked_about_a_fork() -> tuple[References, References, Fork]:
    """An owner that has handed on its only handle, and the user, to which it is in flight."""
    giver, user = References(GIVER), References(ASKED)
    fork = Fork(GloballyUniqueId(GIVER, 1), GloballyUniqueId(GIVER, 2), GIVER)
    giver.fork(fork, ASKED)
    user.on_messages_lost(GIVER)
    assert exchange(giver, user) == [Verb.RESEND, Verb.CHECK]
    assert user.awaited == {GIVER}
    return giver, user, fork


def test_a_fork_that_comes_late_lives() -> None:
    giver, user, fork = asked_about_a_fork()
    user.on_answered(GIVER)
    user.receive(fork, GIVER)
    for _ in range(5):
        user.on_answered(GIVER)
    assert exchange(giver, user) == []
    assert (user.awaited, giver.freed, sum(user.sizes())) == (set(), [], 1)


def test_a_fork_is_not_lost_before_some_answers_of_its_giver_that_lives() -> None:
    giver, user, fork = asked_about_a_fork()
    for member in (GIVER, GIVER, ASKED):
        user.on_answered(member)
        assert exchange(giver, user) == []
    user.on_answered(GIVER)
    assert exchange(giver, user)[0] == Verb.DELETE
    assert giver.freed == [fork.rref_id]
    assert (sum(giver.sizes()), sum(user.sizes()), user.awaited) == (0, 0, set())
    _, user, _ = asked_about_a_fork()
    user.on_member_lost(GIVER)
    assert user.awaited == set()


def test_a_fork_that_ended_long_before_it_is_asked_about_ends_once() -> None:
    giver, user, fork = References(GIVER), *pair_with_fork()
    giver.fork(fork, ASKED)
    user.drop(fork.fork_id)
    for number in range(100):  # which the user remembers instead
        other = fork._replace(fork_id=GloballyUniqueId(GIVER, 10 + number))
        giver.fork(other, ASKED)
        user.receive(other, GIVER)
        user.drop(other.fork_id)
        user.look()
    late = [message for _, message in user.outgoing]
    assert (late[0].verb, late[0].fork_id) == (Verb.DELETE, fork.fork_id)
    user.outgoing.clear()
    user.on_messages_lost(GIVER)
    exchange(giver, user)
    for _ in range(3):
        user.on_answered(GIVER)
    exchange(giver, user)
    for message in late:
        giver.handle(ASKED, message)
        giver.look()
    assert giver.freed == [fork.rref_id]
    assert sum(giver.sizes()) == 0


# -- handlers begin when the owners know of the RRefs in their arguments -------------------


def receiver_of(*locals_: int) -> tuple[References, list[GloballyUniqueId]]:
    """Returns worker 2 with a fork of each of these values of worker 0, and the forks' ids."""
    references, ids = References(2), [GloballyUniqueId(1, 100 + local) for local in locals_]
    for local, fork_id in zip(locals_, ids, strict=True):
        rref_id, parent = GloballyUniqueId(0, local), GloballyUniqueId(1, 200 + local)
        references.receive(Fork(rref_id, fork_id, 0, parent), 1)
    return references, ids


def test_a_handler_begins_when_the_last_fork_is_listed() -> None:
    references, ids = receiver_of(1, 2)
    references.begin_when_listed(ids, begin := object(), deadline=5)
    for serial, fork_id in enumerate(ids):
        assert references.ready == []
        message = ReferenceMessage(Verb.ADDED, serial, GloballyUniqueId(0, 1), fork_id)
        references.handle(0, message)
    assert references.ready == [begin]
    references.begin_when_listed([], also := object(), deadline=5)
    assert references.ready == [begin, also]


def test_a_handler_begins_once_if_the_owner_is_lost_or_the_deadline_has_passed() -> None:
    for event in (lambda r: r.on_member_lost(0), lambda r: r.expire(5.0)):
        references, ids = receiver_of(1)
        references.begin_when_listed(ids, begin := object(), deadline=5)
        references.expire(4.9)
        assert references.ready == []
        for again in (event, event, lambda r: r.on_member_lost(0)):
            again(references)
            assert references.ready == [begin]
