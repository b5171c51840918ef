"""What callees are asked, and when calls and other messages count as lost: the rules."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from zrpc.errors import ProtocolError
from zrpc.services.inspection.questions import (
    Questions,
    Standings,
    dump_question,
    read_question,
)
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

ME, PEER = MemberId(0), MemberId(1)
# What stands in no answer is missing.
NOTHING = Standings({})


@pytest.fixture
def rules() -> Questions:
    made = Questions()
    made.seconds = 2.0
    return made


def number_of(rules: Questions, now: float, calls: Iterable[int] = ()) -> int:
    return rules.ask(PEER, list(calls), now)[0]


def answered(rules: Questions, answer: Standings, now: float, calls: Iterable[int]) -> list[int]:
    """Asks about these calls, and gives this answer; returns what is lost."""
    number = number_of(rules, now, calls)
    lost = rules.take_answer(PEER, number, answer, now)
    assert lost is not None
    return list(lost)


def test_an_answer_is_waited_for_longer_each_time_and_then_asked_for_soon(rules: Questions) -> None:
    """But not for long: a question is lost with a connection that breaks."""
    numbers = [number_of(rules, float(now)) for now in range(30)]
    assert [now for now, number in enumerate(numbers) if number] == [0, 4, 12, 20, 28]
    assert list(filter(None, numbers)) == [1, 2, 3, 4, 5]
    assert rules.take_answer(PEER, 5, NOTHING, 30.0) == []
    assert [number_of(rules, now) for now in (31.9, 32.0)] == [0, 6]
    assert [number_of(rules, now) for now in (35.5, 36.0)] == [0, 7]  # as patient as at first


def test_the_silence_of_a_peer_does_not_delay_later_questions(rules: Questions) -> None:
    numbers = [number_of(rules, float(now), [7]) for now in range(29)]
    assert numbers[28]
    rules.ask_only((), 29.0)  # the call has timed out, and the peer is back
    assert rules.ask(PEER, [8], 31.0)[1] == [8]


def test_what_is_missing_once_is_not_lost(rules: Questions) -> None:
    """It may have been read from a connection before that broke, and come later."""
    now = 0.0

    def answer(*missing: int) -> list[int]:
        nonlocal now
        now += 10.0
        found = Standings({each: "" for each in (7, 8, 9) if each not in missing})
        return answered(rules, found, now, (7, 8, 9))

    answers = [answer(*missing) for missing in [(7,), (), (9, 7), (9,), (7,), (7, 8), (8,)]]
    assert answers == [[], [], [], [9], [], [7], [8]]
    rules.forget(PEER)
    assert answer(8) == []
    rules.ask_only({ME}, now + 1.9)
    assert answer(8) == [8]
    rules.ask_only({ME}, now + 2.0)
    assert answer(8) == []
    assert answer(8) == [8]


def test_one_answer_to_the_questions_since_the_last_one_counts_and_once(rules: Questions) -> None:
    """Those to the others may come right behind it, when the network is slow."""
    first, second, third = (number_of(rules, now, [7]) for now in (0.0, 5.0, 15.0))
    assert rules.take_answer(PEER, second, NOTHING, 16.0) == []
    for number in (second, third, first, 0):
        assert rules.take_answer(PEER, number, NOTHING, 16.0) is None
    assert rules.take_answer(MemberId(2), 1, NOTHING, 16.0) is None
    fourth, _ = number_of(rules, 20.0, [7]), number_of(rules, 25.0, [7])
    assert rules.take_answer(PEER, fourth, NOTHING, 26.0) == [7]


def test_the_questions_without_an_answer_that_are_kept_are_few(rules: Questions) -> None:
    numbers = [number_of(rules, now, [7]) for now in range(0, 800, 8)]
    assert all(numbers)
    assert rules.take_answer(PEER, numbers[-9], NOTHING, 800.0) is None
    assert rules.standing(PEER, 7) == ""
    assert rules.take_answer(PEER, numbers[-8], NOTHING, 800.0) == []
    assert rules.standing(PEER, 7).startswith("unknown")


def test_the_oldest_calls_are_asked_about_and_no_others_are_kept(rules: Questions) -> None:
    number, asked = rules.ask(PEER, range(5000), 0.0)
    assert list(asked) == list(range(1024))
    assert read_question(dump_question(list(asked))) == list(asked)
    told = Standings(dict.fromkeys(range(4000), "running"))
    assert rules.take_answer(PEER, number, told, 1.0) == []
    assert [rules.standing(PEER, call) for call in (1023, 1024)] == ["running", ""]


def test_a_word_counts_once_when_it_has_come_by_all_ways(rules: Questions) -> None:
    """By two ways, one must not do for the other; nor does an old one for a new one."""
    words = [(5, 0), (5, 0), (6, 0), (6, 0), (5, 1), (6, 1), (6, 1), (6, 0), (4, 0)]
    complete = [rules.is_complete(Kind.TELL, PEER, *word, 2) for word in words]
    assert [word for word, each in zip(words, complete, strict=True) if each] == [(5, 1), (6, 1)]
    # Few are kept.
    words = [*((number, 0) for number in range(10, 18)), (6, 1), (10, 1), (18, 0), (10, 1), (18, 1)]
    complete = [rules.is_complete(Kind.TELL, PEER, *word, 2) for word in words]
    assert [word for word, each in zip(words, complete, strict=True) if each] == [(10, 1), (18, 1)]
    assert rules.is_complete(Kind.ASK, PEER, 3, 0, 1)
    assert rules.is_complete(Kind.TELL, MemberId(2), 3, 0, 1)
    rules.forget(PEER)
    assert [rules.is_complete(Kind.TELL, PEER, 1, way, 2) for way in (0, 1)] == [False, True]


def test_messages_are_lost_that_are_missing_twice(rules: Questions) -> None:
    def lost(*looks: tuple[int, float]) -> list[int]:
        return [rules.lost_messages(PEER, 0, short, at) for short, at in looks]

    moments = [(2, 0.0), (2, 0.8), (0, 1.2), (3, 3.0), (3, 3.6), (1, 3.8)]
    assert lost(*moments) == [0] * 6
    # Of three messages, two are missing for more than half of the time between two questions.
    assert lost((0, 4.0), (3, 6.0), (2, 6.8), (2, 7.2)) == [0, 0, 0, 2]
    # They count as received then; another two are missing later.
    assert lost((2, 9.6), (1, 10.8)) == [0, 1]
    assert rules.lost_messages(PEER, 1, 1, 12.0) == 0  # by another way


def test_the_newest_answer_is_told(rules: Questions) -> None:
    def told(call: int, now: float, state: str = "is alive") -> str:
        return rules.describe(PEER, call, "worker1", state, now)

    assert told(7, 0.0) == ""
    answered(rules, Standings({7: "queued"}, "its pool is full"), 0.0, (7, 8))
    assert told(7, 1.0) == "worker1 is alive: its pool is full; this call is queued"
    assert told(8, 1.0).endswith("this call is unknown: it was answered meanwhile, or is lost")
    assert told(0, 9.0) == "9 s ago worker1 said that its pool is full"
    assert told(0, 1.0, "") == "shortly before, its pool is full"
    assert told(0, 9.0, "") == ""
    answered(rules, Standings({7: "running", 8: ""}), 10.0, (7, 8))
    assert [told(call, 10.0) for call in (7, 8, 0)] == [
        "worker1 is alive: this call is running"
    ] + [""] * 2
    number_of(rules, 12.0, (7,))
    number_of(rules, 16.0, (7,))  # again, since no answer has come
    assert told(7, 20.0) == "10 s ago worker1 said that this call is running"
    assert told(9, 13.9) == told(9, 20.0, "") == ""
    assert told(9, 20.0).startswith("worker1 was asked 8.0 s ago where calls to it stand, and has")
    rules.ask_only((), 30.0)
    assert told(7, 10.0) == ""


def test_questions_and_answers_travel_and_nonsense_is_refused() -> None:
    answer = Standings({7: "queued", 8: ""}, "full")
    assert Standings.parse(answer.dump()) == answer
    long = Standings(dict.fromkeys(range(100), "\U00010000\udc00" * 10_000)).dump()
    assert len(Standings.parse(long).calls) == 100
    endless = json.dumps({"calls": {"7": "x" * 100_000}, "load": "y" * 100_000}).encode()
    assert len(Standings.parse(endless).about(7)) < 1000  # it becomes part of errors
    assert read_question(dump_question("self")) == "self"
    deep, large = b"[" * 100_000, json.dumps(list(range(100_000))).encode()
    nonsense = (b"", b"\xff", b"x", b"7", b'{"calls": 7}', deep, large)
    for body in (*nonsense, b'["a"]'):
        with pytest.raises(ProtocolError):
            read_question(body)
    for body in (*nonsense, b"[]", b'{"calls": {"a": ""}, "load": ""}'):
        with pytest.raises(ProtocolError):
            Standings.parse(body)
