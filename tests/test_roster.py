"""The rules of an elastic mesh's membership."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.card import Card
from zrpc.item import Departure, Item, Verb
from zrpc.roster import Roster, What
from zrpc.summary import Summary
from zrpc.worker_info import RANKS, WorkerInfo, incarnation_of, number_of, rank_of


def card(rank, start=0, *, name=None, size=0, restarts=0):
    """The card of one start of a worker."""
    return Card(
        name=f"w{rank}" if name is None else name,
        rank=rank,
        world_size=size,
        token=f"{rank:016x}{start:016x}",
        host_key="host",
        directory=f"/run/{rank}/{start}",
        main="main",
        restarts=restarts,
    )


def join(card):
    return Item(Verb.JOIN, card.token, card)


def come_in(card):
    return Item(Verb.IN, card.token)


def gone(card, why=Departure.LEFT):
    return Item(Verb.GONE, card.token, why=why)


def read(roster, *items):
    return [(c.what, c.card.number, c.why) for item in items for c in roster.read(item)]


@pytest.fixture
def roster():
    return Roster()


def test_a_worker_comes_and_goes(roster):
    one = card(1)
    assert read(roster, join(one)) == [(What.INTRODUCED, 1, None)]
    assert (roster.number(one.token), roster.joined(one.token)) == (1, 1)
    assert roster.admitted == set()
    assert read(roster, come_in(one), come_in(one)) == [(What.ADMITTED, 1, None)]
    assert roster.admitted == {1}
    assert read(roster, gone(one), gone(one)) == [(What.LOST, 1, Departure.LEFT)]
    assert (roster.members, roster.admitted) == ({}, set())
    assert read(roster, come_in(one)) == []  # too late
    assert roster.departed == {1: (one, Departure.LEFT)}
    assert roster.position == 6


def test_a_rank_is_used_again_by_another_incarnation(roster):
    first, second, third = card(1), card(1, 1), card(1, 2, name="another")
    numbers = []
    for one in (first, second, third):
        read(roster, join(one))
        numbers.append(roster.number(one.token))
        read(roster, *([gone(one)] if one is not third else []))
    assert numbers == [1, number_of(1, 1), number_of(1, 2)]
    assert roster.members[number_of(1, 2)] == replace(third, incarnation=2)


def test_an_old_card_is_never_accepted_again(roster):
    old, new = card(1), card(1, 1)
    read(roster, join(old), gone(old))
    assert read(roster, join(old)) == []
    assert read(roster, join(new)) == [(What.INTRODUCED, number_of(1, 1), None)]
    assert read(roster, join(old), come_in(old), gone(old)) == []
    assert list(roster.members) == [number_of(1, 1)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (card(1, 1, name="x"), "rank 1 is not unique: workers w1 and x"),
        (card(2, name="w1"), "worker name w1 is not unique: ranks 1 and 2"),
        (card(1, 1), "rank 1 is not unique: workers w1 and w1"),
        (card(1, 1, name="x", restarts=1), "rank 1 is not unique"),
        (card(2, name="w1", restarts=1), "worker name w1 is not unique"),
        (card(RANKS), f"expected a rank below {RANKS}, found {RANKS}"),
        (card(2, size=3), "RPC group mixes statically and dynamically"),
    ],
)
def test_a_worker_that_is_refused(roster, other, words):
    mine = card(1)
    read(roster, join(mine))
    assert read(roster, join(other)) == []
    assert words in roster.refusal(other.token)
    assert roster.number(other.token) is None
    assert list(roster.members) == [1]
    assert read(roster, come_in(other), gone(other)) == []


def test_who_is_refused_may_ask_again(roster):
    mine, other = card(1), card(1, 1)
    read(roster, join(mine), join(other), gone(mine, Departure.ENDED))
    assert read(roster, join(other)) == [(What.INTRODUCED, number_of(1, 1), None)]
    assert roster.refusal(other.token) is None


def test_a_worker_that_is_started_again_replaces_its_predecessor(roster):
    old, new = card(1), card(1, 1, restarts=1)
    read(roster, join(old), come_in(old))
    assert roster.obstacle(new) is None
    assert read(roster, join(new)) == [
        (What.LOST, 1, Departure.REPLACED),
        (What.INTRODUCED, number_of(1, 1), None),
    ]
    # One that was started again later, and whose news come sooner, is not replaced.
    late = card(1, 2, restarts=1)
    assert roster.obstacle(late) is not None
    assert read(roster, join(late)) == []


def test_a_mesh_of_a_fixed_size(roster):
    cards = [card(rank, size=2) for rank in range(2)]
    read(roster, join(cards[1]))
    assert roster.missing == [0, 1]
    read(roster, come_in(cards[1]), join(cards[0]))
    assert roster.missing == [0]
    read(roster, come_in(cards[0]))
    assert roster.missing == []
    three = card(0, 1, size=3, restarts=1)
    assert "expects a world of 3 workers, but worker" in str(roster.mismatch(three))
    assert read(roster, join(three), join(card(2, size=2))) == []
    read(roster, gone(cards[0], Departure.ENDED))
    assert roster.missing == [0]


def test_who_has_left_while_another_was_started_again(roster):
    cards = [card(rank, size=3) for rank in range(3)]
    read(roster, *map(join, cards), *map(come_in, cards), gone(cards[1], Departure.ENDED))
    again = card(1, 1, size=3, restarts=1)
    read(roster, gone(cards[0]), join(again), come_in(again))
    mine = roster.members[roster.number(again.token)]
    assert roster.deserters(mine) == [WorkerInfo("w0", 0)]
    read(roster, gone(cards[2], Departure.ENDED))  # which may be started again, too
    assert roster.deserters(mine) == [WorkerInfo("w0", 0)]
    read(roster, join(card(0, 1, size=3)), come_in(card(0, 1)))
    assert roster.deserters(mine) == []
    # Where all have left, they may meet anew.
    read(roster, gone(again), gone(card(0, 1)), join(card(1, 2, size=3)))
    assert roster.deserters(roster.members[number_of(1, 2)]) == []


def test_what_cant_be_read_counts_as_an_item(roster):
    assert read(roster, None, join(card(1))) == [(What.INTRODUCED, 1, None)]
    assert roster.position == 2


@pytest.mark.parametrize("item", [join(card(3)), come_in(card(3)), gone(card(3))])
def test_an_item_as_text(item):
    assert Item.parse(item.dump()) == item


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "1",
        "[" * 10_000,
        '["in", "a", null, null]',
        '["join", "a", null, null, ""]',
        '["gone", "a", null, null, ""]',
        '["gone", "a", null, "bored", ""]',
        '["sing", "a", null, null, ""]',
        join(card(3)).dump().replace(card(3).token, card(4).token, 1),
    ],
)
def test_a_text_that_is_no_item(text):
    with pytest.raises(ValueError, match="expected"):
        Item.parse(text)


def test_numbers():
    assert (rank_of(number_of(7, 3)), incarnation_of(number_of(7, 3))) == (7, 3)
    assert WorkerInfo("w", 7).number == 7
    assert WorkerInfo("w", 7, 3).number == number_of(7, 3)
    assert WorkerInfo("w", 7, 3) == WorkerInfo("w", 7)
    assert hash(WorkerInfo("w", 7, 3)) == hash(WorkerInfo("w", 7))


cards = st.builds(
    lambda rank, start, name, again: card(rank, start, name=f"n{name}", restarts=again),
    st.integers(0, 2),
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 2),
)
items = st.one_of(cards.map(join), cards.map(come_in), cards.map(gone), st.none())


@given(st.lists(items, max_size=40))
@settings(max_examples=60, deadline=None)
def test_whatever_the_news_nobody_is_taken_for_another(news):
    roster, numbers = Roster(), {}
    known = set()
    for item in news:
        for change in roster.read(item):
            number, token = change.card.number, change.card.token
            assert numbers.setdefault(number, token) == token
            if change.what is What.INTRODUCED:
                assert number not in known
                known.add(number)
        members = list(roster.members.values())
        assert len({member.rank for member in members}) == len(members)
        assert len({member.name for member in members}) == len(members)
        assert roster.admitted <= roster.members.keys()
        assert not roster.members.keys() & roster.departed.keys()


@given(st.lists(items, max_size=40), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_summary_stands_for_all_that_came_before(news, half):
    roster, late, frozen = Roster(), Roster(), Roster()
    for item in news[:half]:
        roster.read(item)
    for item in news[: half // 2]:
        frozen.read(item)
    summary = Summary.parse(roster.summary().dump())
    assert summary == roster.summary()
    known = set(frozen.members)
    for reader, had in ((late, set()), (frozen, known)):
        changes = [(change.what, change.card.number) for change in reader.read(summary)]
        assert reader.summary() == summary
        lost = {number for what, number in changes if what is What.LOST}
        introduced = {number for what, number in changes if what is What.INTRODUCED}
        assert (had - lost) | introduced == set(roster.members)
        assert len(changes) == len(set(changes))
    for item in news[half:]:
        assert roster.read(item) == late.read(item) == frozen.read(item)
    assert roster.summary() == late.summary() == frozen.summary()


def test_what_is_known_does_not_grow_as_workers_come_and_go(roster):
    sizes = []
    for rank in range(400):
        read(roster, join(card(rank)), join(card(rank, 1, name="w0")), come_in(card(rank)))
        if rank:
            read(roster, gone(card(rank)))
        roster.forget(roster.position - 10)
        sizes.append(len(roster.summary().dump()))
    assert max(sizes[100:]) < sizes[50] + 1000
    assert (len(roster.departed), len(roster.lost)) == (16, 3)
    # Whose number is whose is known for all.
    assert sum(roster.starts.values()) == 400
    again = card(7, 9)
    assert read(roster, join(again)) == [(What.INTRODUCED, number_of(7, 1), None)]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[" * 10_000, "[1, [], []]", "[1, [], [], [[5, 4, 1]]]", "[1, [[1]], [], []]"),
        *(f"[1, [], [], [[0, {RANKS + 1}, 1]]]", '[1, [], [["card", "left"]], []]'),
    ],
)
def test_a_text_that_is_no_summary(text):
    with pytest.raises(ValueError, match="expected a summary"):
        Summary.parse(text)
