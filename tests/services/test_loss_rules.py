"""When calls and other messages count as lost: the rules."""

from __future__ import annotations

from zrpc.services.loss_rules import LossDetectionTiming, LossRules
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

ME, PEER = MemberId(0), MemberId(1)
TIMING = LossDetectionTiming(question_seconds=1.0, patience_seconds=4.0)


def test_an_answer_is_waited_for_longer_each_time_and_then_asked_for_soon() -> None:
    rules = LossRules(TIMING)
    numbers = [rules.ask(PEER, float(now)) for now in range(30)]
    assert [now for now, number in enumerate(numbers) if number] == [0, 4, 12, 28]
    assert list(filter(None, numbers)) == [1, 2, 3, 4]
    assert rules.lost_calls(PEER, 4, set(), 29.0) == []
    assert [rules.ask(PEER, now) for now in (29.4, 29.5)] == [0, 5]
    assert [rules.ask(PEER, now) for now in (33.0, 33.5)] == [0, 6]  # as patient as at first


def test_what_is_missing_once_is_not_lost() -> None:
    """It may have been read from a connection before that broke, and come later."""
    rules, now = LossRules(TIMING), 0.0

    def answer(*missing: int) -> list[int]:
        nonlocal now
        now += 10.0
        return list(rules.lost_calls(PEER, rules.ask(PEER, now), set(missing), now))

    answers = [answer(*missing) for missing in [(7,), (), (9, 7), (9,), (7,), (7, 8), (8,)]]
    assert answers == [[], [], [], [9], [], [7], [8]]
    rules.forget(PEER)
    assert answer(8) == []
    rules.ask_only({ME})
    assert answer(8) == []
    assert answer(8) == [8]


def test_only_the_answer_to_the_latest_question_counts_and_once() -> None:
    rules = LossRules(TIMING)
    first, second = rules.ask(PEER, 0.0), rules.ask(PEER, 5.0)
    for number in (second, second, first, 0):
        assert list(rules.lost_calls(PEER, number, {7}, 6.0)) == []
    assert list(rules.lost_calls(MemberId(2), 1, {7}, 6.0)) == []
    third = rules.ask(PEER, 10.0)
    assert list(rules.lost_calls(PEER, third, {7}, 11.0)) == [7]


def test_a_word_counts_once_when_it_has_come_by_all_ways() -> None:
    """By two ways, one must not do for the other; nor does an old one for a new one."""
    rules = LossRules(TIMING)
    words = [(5, 0), (5, 0), (6, 0), (6, 0), (5, 1), (6, 1), (6, 1), (6, 0), (4, 0)]
    complete = [rules.is_complete(Kind.MISSING, PEER, *word, 2) for word in words]
    assert [word for word, each in zip(words, complete, strict=True) if each] == [(6, 1)]
    assert rules.is_complete(Kind.ROLL_CALL, PEER, 3, 0, 1)
    assert rules.is_complete(Kind.MISSING, MemberId(2), 3, 0, 1)
    rules.forget(PEER)
    assert rules.is_complete(Kind.MISSING, PEER, 1, 0, 1)


def test_messages_are_lost_that_are_missing_twice() -> None:
    rules = LossRules(TIMING)

    def lost(*looks: tuple[int, float]) -> list[int]:
        return [rules.lost_messages(PEER, 0, short, at) for short, at in looks]

    moments = [(2, 0.0), (2, 0.4), (0, 0.6), (3, 1.5), (3, 1.8), (1, 1.9)]
    assert lost(*moments) == [0] * 6
    # Of three messages, two are missing for more than half of the time between two questions.
    assert lost((0, 2.0), (3, 3.0), (2, 3.4), (2, 3.6)) == [0, 0, 0, 2]
    # They count as received then; another two are missing later.
    assert lost((2, 4.8), (1, 5.4)) == [0, 1]
    assert rules.lost_messages(PEER, 1, 1, 6.0) == 0  # by another way
