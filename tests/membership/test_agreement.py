"""The rules of `zrpc.membership.agreement`, in a network of the test's own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.errors import ProtocolError
from zrpc.membership.agreement import Agreement, How, LossNote, pack_notes, parse_notes
from zrpc.wire.member_id import MemberId, member_id_of

LIMIT = 5.0  # whose fifth is a second: a tick of the network
A, B, C, D, E = map(MemberId, range(5))


def unreached(member: MemberId, by: MemberId) -> LossNote:
    return LossNote(How.UNREACHED, member, by, by)


def always(_: MemberId) -> bool:
    return True


# -- one worker --------------------------------------------------------------------------------


def judged_by(own: MemberId, pairs: Collection[tuple[MemberId, MemberId]]) -> LossNote | None:
    agreement = Agreement(own, LIMIT)
    for sender, member in pairs:
        agreement.hear(sender, unreached(member, sender), 0.0)
    return agreement.judge(LIMIT, range(4), always)  # type: ignore[arg-type]


def test_who_has_lost_more_goes_and_of_equals_the_higher_rank() -> None:
    assert judged_by(C, [(A, B)]) == LossNote(How.PUT_OUT, B, C, A)
    assert judged_by(C, [(A, B), (B, A)]) == LossNote(How.PUT_OUT, B, C, A)
    assert judged_by(D, [(B, A), (C, A)]) == LossNote(How.PUT_OUT, A, D, B)
    assert judged_by(A, [(B, A)]) is None  # it is of the pair


def test_a_loss_counts_also_if_the_other_one_has_gone_since() -> None:
    """Of a worker with a bad connection, the first pairs must not cost others their places."""
    agreement = Agreement(A, LIMIT)
    agreement.hear(B, unreached(E, B), 0.0)
    note = agreement.judge(LIMIT, range(5), always)  # type: ignore[arg-type]
    assert note is not None
    agreement.lose(E, note, 0.0)
    for sender, member in ((C, B), (C, D)):
        agreement.hear(sender, unreached(member, sender), 0.0)
    agreement.hear(B, unreached(D, B), 0.0)
    # B has lost three, C and D two.
    found = agreement.judge(LIMIT, range(4), always)  # type: ignore[arg-type]
    assert found is not None
    assert found.member == B


def test_a_rank_is_compared_and_not_how_often_it_was_started() -> None:
    restarted = member_id_of(0, 7)
    agreement = Agreement(C, LIMIT)
    agreement.hear(B, unreached(restarted, B), 0.0)
    found = agreement.judge(LIMIT, [B, C, restarted], always)
    assert found == LossNote(How.PUT_OUT, B, C, restarted)


def test_a_worker_judges_a_pair_only_if_it_reaches_both_and_has_lost_neither() -> None:
    agreement = Agreement(C, LIMIT)
    agreement.hear(A, unreached(B, A), 0.0)
    assert agreement.judge(LIMIT, [A, B, C], lambda member: member != B) is None
    assert agreement.judge(LIMIT, [A, B, C], always) is not None
    agreement.lose(B, None, 0.0)
    assert agreement.judge(LIMIT, [A, C], always) is None


def test_the_lowest_rank_that_is_not_of_the_pair_judges_first() -> None:
    first, second = Agreement(A, LIMIT), Agreement(B, LIMIT)
    for each in (first, second):
        each.hear(C, unreached(D, C), 0.0)
    # Not at once: others may have been lost at the same time.
    assert first.judge(0.5, range(4), always) is None  # type: ignore[arg-type]
    assert first.judge(1.0, range(4), always) is not None  # type: ignore[arg-type]
    assert second.judge(1.0, range(4), always) is None  # type: ignore[arg-type]
    assert second.judge(2.0, range(4), always) is not None  # type: ignore[arg-type]


def test_each_is_told_once_and_again_if_messages_were_lost() -> None:
    agreement = Agreement(A, LIMIT)
    notes = [unreached(D, A), LossNote(How.PUT_OUT, E, C, D)]
    for note in notes:
        agreement.lose(note.member, note, 0.0)
    assert [agreement.untold(B), agreement.untold(B), agreement.untold(C)] == [notes, [], notes]
    assert agreement.is_told(B)
    agreement.tell_again(B)
    assert not agreement.is_told(B)
    assert [agreement.untold(B), agreement.untold(C)] == [notes, []]


def test_a_worker_that_has_lost_another_waits_for_what_others_decide() -> None:
    first, third = Agreement(A, LIMIT), Agreement(C, LIMIT)
    assert first.settled(0.0)
    first.lose(B, LossNote(How.ENDED, B, A, A), 0.0)
    assert first.settled(0.0)
    first.lose(B, unreached(B, A), 0.0)
    third.hear(A, unreached(B, A), 0.0)
    assert [first.settled(now) for now in (0.0, 2.0, 3.0)] == [False, False, True]
    assert not third.settled(3.0)  # it judges them, or loses one of them
    third.lose(B, None, 3.0)
    assert third.settled(3.0)


def test_notes_as_bytes() -> None:
    notes = [unreached(B, A), LossNote(How.PUT_OUT, member_id_of(3, 2), C, A)]
    assert parse_notes(pack_notes(notes)) == notes
    for wrong in (b"x", pack_notes(notes)[:-1], b"\xff" + pack_notes(notes)[1:]):
        with pytest.raises(ProtocolError, match="notes about lost members"):
            parse_notes(wrong)


# -- a mesh ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """A connection that breaks, and may come back. It has no end if it is long."""

    one: int
    other: int
    start: int
    length: int


class Worker:
    """One worker of the network, which does with the rules what the service does."""

    def __init__(self, number: int, count: int) -> None:
        self.id = MemberId(number)
        self.counts = set(map(MemberId, range(count)))
        self.out = False
        self.rules = Agreement(self.id, LIMIT)
        self.verdicts: dict[MemberId, LossNote] = {}

    def lose(self, member: MemberId, note: LossNote | None) -> None:
        if member in self.counts and member != self.id:
            self.counts.discard(member)
            self.rules.lose(member, note, 0.0)

    def put_out(self, note: LossNote) -> None:
        self.verdicts.setdefault(note.member, note)
        if note.member == self.id:
            self.out = True
            for member in self.counts - {self.id}:
                self.lose(member, None)
        self.lose(note.member, note)

    def receive(self, sender: MemberId, notes: Collection[LossNote], now: float) -> None:
        for note in notes:
            if note.member not in self.counts:
                continue
            if note.how is How.PUT_OUT:
                self.put_out(note)
            elif sender in self.counts:
                self.rules.hear(sender, note, now)


class World:
    """A network in which connections break, messages are late, and workers crash."""

    def __init__(self, count: int, cuts: Collection[Cut], crashes: dict[int, int], seed: int):
        self.workers = [Worker(number, count) for number in range(count)]
        self._cuts, self._crashes = cuts, crashes
        self._random = random.Random(seed)
        self._down_since: dict[tuple[int, int], int] = {}
        self._mail: list[tuple[int, int, int, list[LossNote]]] = []
        self.parted: set[int] = set()  # of which a connection was down for long

    def lives(self, number: int, now: int) -> bool:
        return now < self._crashes.get(number, now + 1)

    def _stands(self, one: int, other: int, now: int) -> bool:
        both = {one, other}
        broken = any(
            {cut.one, cut.other} == both and cut.start <= now < cut.start + cut.length
            for cut in self._cuts
        )
        return not broken and self.lives(one, now) and self.lives(other, now)

    def step(self, now: int) -> None:
        pairs = list(itertools.permutations(range(len(self.workers)), 2))
        for one, other in pairs:
            if self._stands(one, other, now):
                self._down_since.pop((one, other), None)
            else:
                # Heartbeats are not sent at the same time: either side may find out first.
                since = self._down_since.setdefault((one, other), now - self._random.randrange(2))
                if now - since >= LIMIT:
                    self.parted |= {one, other}
                    self._find_lost(one, other)
        for late in self._mail:
            if late[0] <= now:
                self._deliver(*late, now=now)
        self._mail = [late for late in self._mail if late[0] > now]
        for one, other in pairs:
            if self._stands(one, other, now):
                self._speak(self.workers[one], self.workers[other], now)
        for worker in self.workers:
            if not self.lives(worker.id, now):
                continue

            def reaches(member: MemberId, own: int = worker.id) -> bool:
                return self._stands(own, member, now)

            while (note := worker.rules.judge(now, worker.counts, reaches)) is not None:
                worker.put_out(note)

    def _find_lost(self, one: int, other: int) -> None:
        worker, member = self.workers[one], MemberId(other)
        worker.lose(member, unreached(member, worker.id))

    def _speak(self, worker: Worker, peer: Worker, now: int) -> None:
        if peer.id in worker.counts:
            if notes := worker.rules.untold(peer.id):
                self._mail.append((now + self._random.randrange(2), worker.id, peer.id, notes))
        elif worker.out:
            peer.receive(worker.id, [worker.verdicts[worker.id]], now)
        elif peer.id in worker.verdicts:
            peer.receive(worker.id, [worker.verdicts[peer.id]], now)
        else:  # it is told that it was declared dead
            self._find_lost(peer.id, worker.id)

    def _deliver(self, _: int, sender: int, to: int, notes: list[LossNote], now: int) -> None:
        if not self._stands(sender, to, now):
            self.workers[sender].rules.tell_again(MemberId(to))
        elif sender in self.workers[to].counts:
            self.workers[to].receive(MemberId(sender), notes, now)


LASTS = 1000


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(3, 6))
    numbers = st.integers(0, count - 1)
    ends = st.tuples(numbers, numbers).filter(lambda both: both[0] != both[1])
    times = st.integers(0, 12)
    lengths = st.one_of(st.just(LASTS), st.integers(1, 12))
    cuts = st.builds(lambda both, start, long: Cut(*both, start, long), ends, times, lengths)
    crashes = draw(st.dictionaries(numbers, times, max_size=1))
    return World(count, draw(st.lists(cuts, max_size=8)), crashes, draw(st.integers(0, 999)))


@settings(max_examples=150)
@given(worlds())
def test_all_that_reach_each_other_agree_in_the_end(world: World) -> None:
    end = 80
    for now in range(end):
        world.step(now)
    living = [worker for worker in world.workers if world.lives(worker.id, end)]
    for worker in living:
        for member in worker.counts:
            assert world.workers[member].counts == worker.counts
        if worker.id not in world.parted:
            assert not worker.out
