"""The rules of streams, whose messages arrive in any order, or not at all."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.errors import ProtocolError, SerializationError
from zrpc.services.streams.batches import Credit, check_size, dump_batch, parse_head, parts_of
from zrpc.services.streams.inflow import Inflow
from zrpc.services.streams.outflow import Outflow, Step
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

END = "the answer"
DIED = "the producer died"


def item(number: int, size: int, alone: bool) -> Message:
    body = b"%d." % number
    buffers = [b"x" * size] if alone else ()
    return Message(Kind.ITEMS, body=body if alone else body + b"x" * size, buffers=buffers)


def values_of(batch: Message) -> list[int]:
    found: list[Any] = []
    for count, part in parts_of(batch):
        if count:
            found.extend(pickle.loads(part.body))
        else:
            found.append(part.body)
            assert not part.buffers or part.buffers is batch.buffers
    return [int(bytes(each).split(b".")[0]) for each in found]


@dataclass
class Link:
    """A producer and a consumer, and the messages between them, in no order."""

    prefetch: int
    max_bytes: int
    length: int
    sizes: list[int]
    out: Outflow = field(init=False)
    into: Inflow = field(init=False)
    batches: list[tuple[int, Message]] = field(default_factory=list)
    credit: list[Credit] = field(default_factory=list)
    answer: list[tuple[Any, int]] = field(default_factory=list)
    made: int = 0
    made_bytes: int = 0
    opened_bytes: int = 0
    runs: bool = True
    closed: bool = False
    got: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    outcome: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out = Outflow(self.prefetch, self.max_bytes)
        self.into = Inflow(self.prefetch, self.max_bytes)

    # -- what may happen -----------------------------------------------------------------------

    def step(self, _: int) -> bool:
        """The thread that runs the generator makes an item, rests, closes it or ends."""
        if not self.runs:
            return False
        step = self.out.next_step()
        if step is Step.CLOSE or (step is Step.GO and self.made == self.length):
            self.runs = False
            self.closed = step is Step.CLOSE
            self.send()
            self.out.ended = True
            self.answer.append((END, self.out.total))
        elif step is Step.GO:
            size = self.sizes[self.made % len(self.sizes)]
            if size % 2:  # a value that is packed by the batch
                due = self.out.add(b"%d." % self.made + b"x" * size, size)
            else:
                made = item(self.made, size, alone=size > 50)
                due = self.out.add(made, made.nbytes)
            if due:
                self.send()
            else:
                assert self.out.next_step() is Step.GO
            self.made += 1
            self.made_bytes += size
            ahead = self.made - len(self.got)
            assert ahead <= self.prefetch, "the producer is too far ahead"
            most = self.max_bytes + max(self.sizes)
            assert not self.max_bytes or self.made_bytes - self.opened_bytes <= most
        else:
            self.send()
            self.runs = not self.out.rest()
        return True

    def send(self) -> None:
        while (batch := self.out.take()) is not None:
            self.batches.append((batch[0], dump_batch(7, *batch)))

    def deliver_batch(self, which: int) -> bool:
        if not self.batches:
            return False
        number, batch = self.batches.pop(which % len(self.batches))
        assert parse_head(batch)[0] == number
        self.into.arrive(batch)
        self.report(self.into.credit(len(self.items), always=True))
        return True

    def deliver_credit(self, which: int) -> bool:
        if not self.credit:
            return False
        if self.out.give(self.credit.pop(which % len(self.credit))):
            self.send()
        if self.out.wake():
            assert not self.runs, "two threads run one generator"
            self.runs = True
        return True

    def deliver_answer(self, _: int) -> bool:
        if not self.answer:
            return False
        self.into.end(*self.answer.pop())
        return True

    def read(self, _: int) -> bool:
        """The program takes an item, or waits for one."""
        if self.outcome:
            return False
        if not self.items:
            batch = self.into.first()
            if batch is None:
                self.report(self.into.credit(0))
                if not self.into.over:
                    return False
                self.outcome = self.into.outcome
                return True
            values = values_of(batch)
            self.into.open(len(values))
            self.items.extend(values)
            self.opened_bytes += sum(self.sizes[each % len(self.sizes)] for each in values)
            self.report(self.into.credit(max(0, len(values) - 1)))
        if self.items:
            self.got.append(self.items.pop(0))
        return True

    def report(self, credit: Credit | None) -> None:
        if credit is not None:
            self.credit.append(credit)

    def close(self) -> None:
        """The consumer has closed, or is dead: its call is cancelled."""
        if not self.out.closing and not self.out.ended:
            self.out.closing = True
            if self.out.wake():
                self.runs = True

    # -- from beginning to end -----------------------------------------------------------------

    def happens(self, choices: list[tuple[int, int]]) -> None:
        acts = (self.step, self.deliver_batch, self.deliver_credit, self.deliver_answer, self.read)
        for act, which in choices:
            acts[act](which)
            self.check()

    def drain(self, reading: bool = True) -> None:
        """Lets everything happen that can, until nothing more does."""
        acts = [self.step, self.deliver_batch, self.deliver_credit, self.deliver_answer]
        if reading:
            acts.append(self.read)
        while sum(act(0) for act in acts):
            self.check()

    def check(self) -> None:
        assert self.got == list(range(len(self.got))), "an item is missing, or out of order"


links = st.builds(
    Link,
    prefetch=st.integers(1, 9),
    max_bytes=st.sampled_from([0, 1, 60, 300]),
    length=st.integers(0, 25),
    sizes=st.lists(st.integers(0, 100), min_size=1, max_size=4),
)
choices = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=80)


@given(links, choices)
def test_all_items_come_in_order_and_then_the_end(link: Link, choices: Any) -> None:
    link.happens(choices)
    link.drain()
    assert link.got == list(range(link.length))
    assert link.outcome == [END]


@given(links, choices)
def test_the_generator_is_closed_once_if_the_consumer_leaves(link: Link, choices: Any) -> None:
    link.happens(choices)
    had_ended = link.out.ended
    link.close()
    link.drain(reading=False)
    assert link.out.ended
    assert not link.runs
    assert link.closed is not had_ended
    assert not link.out.wake(), "it would run after its end"


@given(links, choices)
def test_a_dead_producer_ends_the_stream_after_its_items(link: Link, choices: Any) -> None:
    link.happens(choices)
    link.runs = False
    link.batches.clear()
    ended = link.into.complete
    link.into.end(DIED)
    link.credit.clear()
    while link.read(0):
        link.check()
    assert link.outcome == [END if ended else DIED]


@given(links, choices)
def test_a_consumer_that_does_not_read_holds_few_items(link: Link, choices: Any) -> None:
    link.happens([each for each in choices if each[0] != 4])
    link.drain(reading=False)
    assert link.made <= link.prefetch
    if link.max_bytes:
        assert link.made_bytes < link.max_bytes + max(link.sizes)


def test_a_batch_that_comes_twice_is_refused() -> None:
    inflow = Inflow(4, 0)
    inflow.arrive(dump_batch(1, 1, 0, [item(1, 0, False)]))
    for number in (1, 0, 0):
        batch = dump_batch(1, number, 0, [item(number, 0, False)])
        if number == 0 and inflow.first() is None:
            inflow.arrive(batch)
            continue
        with pytest.raises(ProtocolError, match="again"):
            inflow.arrive(batch)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_batch_raise_a_protocol_error(body: bytes) -> None:
    message = Message(Kind.ITEMS, body=body)
    for read in (parse_head, lambda message: list(parts_of(message)), Credit.parse):
        with contextlib.suppress(ProtocolError):
            read(message)


def test_a_stream_ends_before_a_batch_that_could_not_be_sent() -> None:
    out = Outflow(8, 0)
    for number in range(3):
        out.add(item(number, 0, False), 0)
        out.take()
    out.cut(1)
    assert out.next_step() is Step.CLOSE
    assert out.total == 1


def test_an_item_that_is_too_large_is_refused() -> None:
    with mmap(-1, 2**32) as memory, memoryview(memory) as body:  # whose pages are never used
        with pytest.raises(SerializationError, match="less than 4 GiB, found one of 4294967296"):
            check_size(Message(Kind.ITEMS, body=body))
        with body[1:] as largest:
            check_size(Message(Kind.ITEMS, body=largest))
