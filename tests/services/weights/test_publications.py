"""Names: at most one live publisher has one, and versions grow, in any order of events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zrpc.services.weights.publications import BLOCK, PublicationId, Publications
from zrpc.wire.member_id import MemberId

A, B = PublicationId(MemberId(0), 1), PublicationId(MemberId(1), 1)


def test_the_successor_of_a_dead_publisher_leaves_out_a_block_of_numbers() -> None:
    lost: set[MemberId] = set()
    table = Publications(lost.__contains__)
    table.claim("p", A)
    table.announce("p", A, 5)
    lost.add(A.owner)
    assert table.claim("p", B) == (None, 5 + BLOCK)


def test_an_end_at_an_unknown_version_leaves_out_a_block_unless_it_is_known() -> None:
    for known, bound in ((None, BLOCK), (9, 9)):
        table = Publications(lambda _: False)
        table.claim("p", A)
        table.announce("p", A, 0)
        if known:
            table.end("p", A, known)
        table.end("p", A, None)
        assert table.claim("p", B) == (None, bound)


def test_words_of_a_publication_that_overtake_each_other_leave_it_ended() -> None:
    table = Publications(lambda _: False)
    table.end("p", A, 3)
    table.announce("p", A, 0)
    assert table.claim("p", B) == (None, 3)
    table.announce("p", B, 3)
    table.announce("p", A, 0)
    assert table.claim("p", A) == (1, 3 + BLOCK)


class _Attempt:
    """A worker on its way to publish: it claims at one member after another."""

    def __init__(self, id: PublicationId, members: list[int]) -> None:
        self.id = id
        self.members = members
        self.left = list(members)
        self.before = 0


class NameMachine(RuleBasedStateMachine):
    """Members that join, die and publish at any time, with messages in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[Any] = set()
        self.tables = {m: Publications(self.lost.__contains__) for m in (0, 2, 4)}
        self.number = 0
        self.attempts: list[_Attempt] = []
        self.live: dict[PublicationId, int] = {}
        self.highest = 0

    def living(self) -> list[int]:
        return sorted(set(self.tables) - self.lost)

    @rule(data=st.data())
    def begin(self, data: Any) -> None:
        self.number += 1
        owner = data.draw(st.sampled_from(self.living()))
        self.attempts.append(_Attempt(PublicationId(owner, self.number), self.living()))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def go_on(self, data: Any) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        if not attempt.left:
            self.attempts.remove(attempt)
            assert not self.live, "two publishers live"
            for member in attempt.members:
                self.tables[member].announce("p", attempt.id, attempt.before)
            # Those that have joined meanwhile are told, too.
            for member in set(self.living()) - set(attempt.members):
                self.tables[member].announce("p", attempt.id, attempt.before)
            assert attempt.before >= self.highest
            self.live[attempt.id] = self.highest = attempt.before
            return
        member = attempt.left.pop(0)
        if member in self.lost:
            return
        holder, bound = self.tables[member].claim("p", attempt.id)
        attempt.before = max(attempt.before, bound)
        if holder is not None:
            self.attempts.remove(attempt)
            for each in attempt.members:
                self.tables[each].end("p", attempt.id, 0)

    @precondition(lambda self: self.live)
    @rule()
    def push(self) -> None:
        (id,) = self.live
        self.live[id] += 1
        assert self.live[id] > self.highest
        self.highest = self.live[id]

    @precondition(lambda self: self.live)
    @rule()
    def close(self) -> None:
        id, last = self.live.popitem()
        for member in self.living():
            self.tables[member].end("p", id, last)

    @precondition(lambda self: len(self.living()) > 1)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        member = data.draw(st.sampled_from(self.living()))
        self.lost.add(member)
        self.live = {id: last for id, last in self.live.items() if id.owner != member}
        self.attempts = [each for each in self.attempts if each.id.owner != member]

    @precondition(lambda self: len(self.tables) < 12)
    @rule(data=st.data())
    def join(self, data: Any) -> None:
        member = data.draw(st.integers(0, 40).filter(lambda m: m not in self.tables))
        self.tables[member] = Publications(self.lost.__contains__)
        for other in set(self.living()) - {member}:
            for each in self.tables[other].all():
                self.tables[member].learn(*each)

    @invariant()
    def a_name_is_free_if_nobody_wants_it(self) -> None:
        if not self.live and not self.attempts:
            for member in self.living():
                found = self.tables[member].latest("p")
                assert found is None or not self.tables[member].is_live(found)


TestNameMachine = pytest.mark.system(NameMachine.TestCase)
TestNameMachine.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
