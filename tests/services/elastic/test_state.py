"""The rules of an elastic mesh's membership."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.records import peer_record
from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.elastic.state import MembershipEvent, MembershipState, Verb
from zrpc.wire.member_id import RANKS, member_id_of


def record(
    rank: int, start: int = 0, *, name: str | None = None, size: int = 0, restarts: int = 0
) -> PeerRecord:
    """The record of one start of a worker."""
    name = f"w{rank}" if name is None else name
    return peer_record(rank, size, start=start, name=name, restarts=restarts)


def join(record: PeerRecord) -> MembershipEvent:
    return MembershipEvent(Verb.JOIN, record.token, record)


def come_in(record: PeerRecord) -> MembershipEvent:
    return MembershipEvent(Verb.IN, record.token)


def gone(record: PeerRecord, why: Reason = Reason.LEFT) -> MembershipEvent:
    return MembershipEvent(Verb.GONE, record.token, why=why)


def apply(
    state: MembershipState, *events: MembershipEvent | None
) -> list[tuple[Verb, int, Reason | None]]:
    return [(c.verb, c.record.member_id, c.why) for event in events for c in state.apply(event)]


@pytest.fixture
def state() -> MembershipState:
    return MembershipState()


def test_a_rank_is_used_again_but_never_an_old_record(state: MembershipState) -> None:
    records = [record(1), record(1, 1), record(1, 2, name="another")]
    for incarnation, one in enumerate(records):
        member = member_id_of(1, incarnation)
        assert apply(state, join(one)) == [(Verb.JOIN, member, None)]
        assert apply(state, come_in(one), come_in(one)) == [(Verb.IN, member, None)]
        assert state.member_of(one.token) == member
        assert state.members == {member: replace(one, incarnation=incarnation)}
        for old in records[:incarnation]:
            assert apply(state, join(old), come_in(old), gone(old)) == []
        apply(state, gone(one))
        assert apply(state, join(one)) == []


def test_a_worker_that_is_refused_may_ask_again(state: MembershipState) -> None:
    mine = record(1)
    apply(state, join(mine))
    for other, words in (
        (record(1, 1, name="x"), "rank 1 is not unique: workers w1 and x"),
        (record(2, 2, name="w1"), "worker name w1 is not unique: ranks 1 and 2"),
        (record(1, 3, name="x", restarts=1), "rank 1 is not unique"),
        (record(2, 4, name="w1", restarts=1), "worker name w1 is not unique"),
        (record(RANKS), f"expected a rank below {RANKS}, found {RANKS}"),
        (record(2, 5, size=3), "RPC group mixes statically and dynamically"),
        (record(1, 6), "rank 1 is not unique: workers w1 and w1"),
    ):
        assert apply(state, join(other)) == []
        assert words in state.refusal(other.token)
        assert state.member_of(other.token) is None
        assert list(state.members) == [1]
        assert apply(state, come_in(other), gone(other)) == []
    apply(state, gone(mine, Reason.ENDED))
    assert apply(state, join(other)) == [(Verb.JOIN, member_id_of(1, 1), None)]
    assert state.refusal(other.token) is None


def test_a_restarted_worker_replaces_its_predecessor(state: MembershipState) -> None:
    old, new = record(1), record(1, 1, restarts=1)
    apply(state, join(old), come_in(old))
    assert state.obstacle(new) is None
    assert apply(state, join(new)) == [
        (Verb.GONE, 1, Reason.REPLACED),
        (Verb.JOIN, member_id_of(1, 1), None),
    ]
    # A worker that was restarted later, and whose event comes sooner, is not replaced.
    late = record(1, 2, restarts=1)
    assert state.obstacle(late) is not None
    assert apply(state, join(late)) == []


def test_a_mesh_of_a_fixed_size(state: MembershipState) -> None:
    records = [record(rank, size=2) for rank in range(2)]
    apply(state, join(records[1]))
    assert state.missing == [0, 1]
    apply(state, come_in(records[1]), join(records[0]))
    assert state.missing == [0]
    apply(state, come_in(records[0]))
    assert state.missing == []
    three = record(0, 1, size=3, restarts=1)
    assert "expects a world of 3 workers, but worker" in str(state.mismatch(three))
    assert apply(state, join(three), join(record(2, size=2))) == []
    apply(state, gone(records[0], Reason.ENDED))
    assert state.missing == [0]


def test_workers_that_left_while_another_was_restarted(state: MembershipState) -> None:
    records = [record(rank, size=3) for rank in range(3)]
    apply(state, *map(join, records), *map(come_in, records), gone(records[1], Reason.ENDED))
    again = record(1, 1, size=3, restarts=1)
    apply(state, gone(records[0]), join(again), come_in(again))
    mine = state.members[state.member_of(again.token)]
    assert state.left_during_restart(mine) == [WorkerInfo("w0", 0)]
    apply(state, gone(records[2], Reason.ENDED))  # which may be restarted too
    assert state.left_during_restart(mine) == [WorkerInfo("w0", 0)]
    apply(state, join(record(0, 1, size=3)), come_in(record(0, 1)))
    assert state.left_during_restart(mine) == []
    # If all have left, they may meet in a new mesh.
    apply(state, gone(again), gone(record(0, 1)), join(record(1, 2, size=3)))
    assert state.left_during_restart(state.members[member_id_of(1, 2)]) == []
    assert state.left() == [WorkerInfo("w0", 0)]


def test_an_unreadable_entry_counts_as_an_event(state: MembershipState) -> None:
    assert apply(state, None, join(record(1))) == [(Verb.JOIN, 1, None)]
    assert state.position == 2


def test_a_text_that_is_not_an_event_or_a_snapshot() -> None:
    for text in (
        *("", "[]", "{}", "1", "[" * 10_000),
        '["in", "a", null, null]',
        '["join", "a", null, null, ""]',
        '["gone", "a", null, null, ""]',
        '["gone", "a", null, "bored", ""]',
        '["sing", "a", null, null, ""]',
        join(record(3)).dump().replace(record(3).token, record(4).token, 1),
    ):
        with pytest.raises(ValueError, match="expected"):
            MembershipEvent.parse(text)
    for text in (
        *("", "[]", "[" * 10_000, "[1, [], []]", "[1, [], [], [[5, 4, 1]]]", "[1, [[1]], [], []]"),
        *(f"[1, [], [], [[0, {RANKS + 1}, 1]]]", '[1, [], [["record", "LEFT"]], []]'),
    ):
        with pytest.raises(ValueError, match="expected a snapshot"):
            MembershipState.parse(text)


records = st.builds(
    lambda rank, start, name, again: record(rank, start, name=f"n{name}", restarts=again),
    st.integers(0, 2),
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 2),
)
events = st.one_of(records.map(join), records.map(come_in), records.map(gone), st.none())


@pytest.mark.system
@given(st.lists(events, max_size=40))
@settings(max_examples=60)
def test_no_worker_is_taken_for_another_whatever_the_events(
    log: list[MembershipEvent | None],
) -> None:
    state, numbers = MembershipState(), {}
    known = set()
    for event in log:
        for change in state.apply(event):
            number, token = change.record.member_id, change.record.token
            assert numbers.setdefault(number, token) == token
            if change.verb is Verb.JOIN:
                assert number not in known
                known.add(number)
        members = list(state.members.values())
        assert len({member.rank for member in members}) == len(members)
        assert len({member.name for member in members}) == len(members)
        assert state.admitted <= state.members.keys()
        assert not state.members.keys() & state.departed.keys()


@pytest.mark.system
@given(st.lists(events, max_size=40), st.integers(0, 40))
@settings(max_examples=60)
def test_a_snapshot_replaces_all_earlier_events(
    log: list[MembershipEvent | None], half: int
) -> None:
    state, late, frozen = MembershipState(), MembershipState(), MembershipState()
    for event in log[:half]:
        state.apply(event)
    for event in log[: half // 2]:
        frozen.apply(event)
    snapshot = state.dump()
    assert MembershipState.parse(snapshot).dump() == snapshot
    known = set(frozen.members)
    for reader, had in ((late, set()), (frozen, known)):
        changes = [
            (change.verb, change.record.member_id)
            for change in reader.apply(MembershipState.parse(snapshot))
        ]
        assert reader.dump() == snapshot
        lost = {number for what, number in changes if what is Verb.GONE}
        introduced = {number for what, number in changes if what is Verb.JOIN}
        assert (had - lost) | introduced == set(state.members)
        assert len(changes) == len(set(changes))
    for event in log[half:]:
        assert state.apply(event) == late.apply(event) == frozen.apply(event)
    assert state.dump() == late.dump() == frozen.dump()


def test_the_state_does_not_grow_as_workers_come_and_go(state: MembershipState) -> None:
    sizes = []
    for rank in range(400):
        apply(state, join(record(rank)), join(record(rank, 1, name="w0")), come_in(record(rank)))
        if rank:
            apply(state, gone(record(rank)))
        state.forget_lost(state.position - 10)
        sizes.append(len(state.dump()))
    assert max(sizes[100:]) < sizes[50] + 1000
    assert (len(state.departed), len(state.lost)) == (16, 3)
    # The member ids of all of them are known.
    assert sum(state.starts.values()) == 400
    again = record(7, 9)
    assert apply(state, join(again)) == [(Verb.JOIN, member_id_of(7, 1), None)]
