"""The rules of an actor's mailbox: messages arrive in any order, and calls end in any way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.services.actors.mailbox import Mailbox, Turn


@dataclass(eq=False)
class Scope:
    cancelled: bool = False
    begun: bool = False
    deferred: bool = False


@dataclass(eq=False)
class Request:
    """A call, and what has become of it."""

    name: object
    nbytes: int = 10
    scope: Scope = field(default_factory=Scope)
    refused: BaseException | None = None


class Full(Exception):
    pass


class Stopped(Exception):
    pass


class Owner:
    """Does what a mailbox says, at once."""

    def __init__(self, concurrency: int = 1, max_bytes: int = 0, **beside: int) -> None:
        self.busy: set[Mailbox] = set()
        self.mailbox = Mailbox("Thing", concurrency, beside, max_bytes, Full, self.busy)
        self.begun: list[Request] = []
        self.running: list[Request] = []

    def call_of(self, request: Request) -> object:
        def begin() -> None:
            if not request.scope.cancelled:
                request.scope.begun = True
                self.begun.append(request)
                self.running.append(request)
                self.mailbox.do(self.mailbox.on_begun(request.scope))

        def refuse(error: BaseException) -> None:
            request.refused = error

        return request, begin, refuse

    def arrive(
        self, request: Request, sender: int = 1, turn: Turn | None = None, method: str = ""
    ) -> Request:
        self.mailbox.do(self.mailbox.arrive(self.call_of(request), sender, turn, method))  # type: ignore[arg-type]
        return request

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.mailbox.do(self.mailbox.end(request.scope))

    def names(self) -> list[object]:
        return [each.name for each in self.begun]


@given(
    seed=st.integers(0, 2**32),
    concurrency=st.integers(1, 3),
    calls=st.lists(st.tuples(st.integers(1, 3), st.sampled_from("msbd")), max_size=30),
)
@settings(max_examples=300)
def test_each_caller_s_calls_begin_in_order_and_none_is_stuck(
    seed: int, concurrency: int, calls: list[tuple[int, str]]
) -> None:
    """m: a call; s: its number is not used; b: beside the others; d: abandoned before it begins."""
    chance = random.Random(seed)
    owner = Owner(concurrency, beside=2)
    numbers: dict[int, int] = {}
    events = []
    wanted = []
    for sender, what in calls:
        number = numbers.get(sender, 0)
        numbers[sender] = number + 1
        request = Request((sender, number, what))
        request.scope.cancelled = what == "d"
        events.append((sender, number, what, request))
        if what in "mb":
            wanted.append(request)
    chance.shuffle(events)  # messages may overtake each other
    while events or owner.running:
        if owner.running and (not events or chance.random() < 0.5):
            owner.end(chance.choice(owner.running))
        else:
            sender, number, what, request = events.pop()
            if what == "s":
                owner.mailbox.do(owner.mailbox.skip(sender, (1, number)))
            else:
                owner.arrive(request, sender, (1, number), "beside" if what == "b" else "f")
        owner.mailbox.do(owner.mailbox.sweep())
        look = owner.mailbox.look()
        if any(running or waiting for running, waiting in look) or owner.mailbox.missing():
            assert owner.busy == {owner.mailbox}
        in_turn = [each for each in owner.running if each.name[2] == "m"]  # type: ignore[index]
        assert len(in_turn) <= concurrency
    assert sorted(map(id, owner.begun)) == sorted(map(id, wanted))
    for sender in numbers:
        order = [n for s, n, what in owner.names() if s == sender and what == "m"]  # type: ignore[misc]
        assert order == sorted(order)
    assert not any(running or waiting for running, waiting in owner.mailbox.look())
    assert not owner.mailbox.missing()
    owner.mailbox.do(owner.mailbox.sweep())
    assert not owner.busy  # an idle actor costs nothing


@given(seed=st.integers(0, 2**32), lost=st.sets(st.integers(0, 9)))
def test_lost_messages_hold_up_others_only_until_that_is_known(seed: int, lost: set[int]) -> None:
    owner = Owner(concurrency=20)
    sent = [number for number in range(10) if number not in lost]
    random.Random(seed).shuffle(sent)
    for number in sent:
        owner.arrive(Request(number), 1, (1, number))
    while owner.mailbox.missing():
        owner.mailbox.do(owner.mailbox.on_answered(1))
    assert owner.names() == sorted(sent)


def test_a_call_whose_message_was_taken_for_lost_begins_when_it_comes_after_all() -> None:
    owner = Owner(concurrency=5)
    owner.arrive(Request(1), 1, (1, 1))
    while owner.mailbox.missing():
        owner.mailbox.do(owner.mailbox.on_answered(1))
    owner.arrive(Request(0), 1, (1, 0))
    owner.arrive(Request(2), 1, (1, 2))
    assert owner.names() == [1, 0, 2]


def test_a_new_series_of_a_caller_begins_at_once() -> None:
    owner = Owner(concurrency=5)
    held = owner.arrive(Request("held"), 1, (1, 3))
    held.scope.cancelled = True
    owner.arrive(Request("new"), 1, (2, 0))
    assert owner.names() == ["new"]
    owner.arrive(Request("late"), 1, (1, 4))
    assert owner.names() == ["new", "late"]


def test_what_a_lost_worker_has_sent_is_left_out_and_the_others_go_on() -> None:
    owner = Owner()
    first = owner.arrive(Request("first"), 1, (1, 0))
    gone = owner.arrive(Request("gone"), 2, (1, 5))
    gone.scope.cancelled = True
    owner.arrive(Request("next"), 1, (1, 1))
    owner.mailbox.do(owner.mailbox.forget(2))
    owner.end(first)
    assert owner.names() == ["first", "next"]
    assert not owner.mailbox.missing()


def test_a_call_that_is_abandoned_in_the_queue_of_the_pool_gives_up_its_place() -> None:
    owner = Owner()
    mailbox, scope = owner.mailbox, Scope()
    queued = Request("queued", scope=scope)
    mailbox.do(mailbox.arrive((queued, lambda: None, lambda _: None), 1, (1, 0)))  # not begun yet
    owner.arrive(Request("next"), 1, (1, 1))
    mailbox.do(mailbox.sweep())
    assert owner.names() == []
    scope.cancelled = True
    mailbox.do(mailbox.sweep())
    assert owner.names() == ["next"]
    mailbox.do(mailbox.end(scope))  # the pool's thread finds that it must not begin
    assert [each.name for each in mailbox.look()[0][0]] == ["next"]


def test_the_next_call_begins_only_once_the_one_before_has_begun() -> None:
    owner = Owner(concurrency=3)
    mailbox = owner.mailbox
    slow, failed = Request("slow"), Request("failed")
    mailbox.do(mailbox.arrive((slow, lambda: None, lambda _: None), 1, (1, 0)))
    mailbox.do(mailbox.arrive((failed, lambda: None, lambda _: None), 1, (1, 1)))
    owner.arrive(Request("next"), 1, (1, 2))
    mailbox.do(mailbox.on_begun(slow.scope))
    assert owner.names() == []
    mailbox.do(mailbox.end(failed.scope))  # its arguments could not be read
    assert owner.names() == ["next"]


def test_abandoned_calls_make_room_for_others() -> None:
    owner = Owner(max_bytes=10_000)
    owner.arrive(Request("running"), 1, (1, 0))
    for number in range(1, 100):
        waits = owner.arrive(Request(number, 5_000), 1, (1, number))
        assert waits.refused is None
        waits.scope.cancelled = True
    assert owner.mailbox.look()[0][1] == []


@pytest.mark.parametrize("early", [False, True])
def test_a_stop_refuses_what_waits_and_what_comes_and_begins_when_none_runs(early: bool) -> None:
    owner = Owner(concurrency=2, size=0)
    running = [owner.arrive(Request(number), 1, (1, number)) for number in range(2)]
    waits = owner.arrive(Request("waits"), 1, (1, 3 if early else 2))
    close, again = Request("close"), Request("again")
    owner.mailbox.do(owner.mailbox.stop(Stopped(), owner.call_of(close)))  # type: ignore[arg-type]
    owner.mailbox.do(owner.mailbox.stop(Stopped(), owner.call_of(again)))  # type: ignore[arg-type]
    late = owner.arrive(Request("late"), 2, (1, 0))
    assert [type(each.refused) for each in (waits, late)] == [Stopped, Stopped]
    assert owner.mailbox.look()[0][1] == [close, again]
    owner.mailbox.do(owner.mailbox.refuse(close.scope, Full()))  # its caller need not wait
    assert type(close.refused) is Full
    owner.end(running[0])
    assert close not in owner.begun
    owner.end(running[1])
    owner.end(close)
    owner.end(again)
    assert owner.names()[2:] == ["close", "again"]


def test_a_call_that_can_not_begin_is_refused_and_holds_up_no_others() -> None:
    """There was no memory for it, for example."""
    owner = Owner()
    mailbox, refused = owner.mailbox, []
    first = owner.arrive(Request("first"), 1, (1, 0))
    failing = Request("failing")
    mailbox.do(mailbox.arrive((failing, lambda: divmod(1, 0), refused.append), 1, (1, 1)))  # type: ignore[arg-type, return-value]
    owner.arrive(Request("next"), 1, (1, 2))
    owner.end(first)
    assert [type(error) for error in refused] == [ZeroDivisionError]
    mailbox.do(mailbox.sweep())
    assert owner.names() == ["first", "next"]
