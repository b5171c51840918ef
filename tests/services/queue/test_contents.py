"""What is in a queue and who waits for it: the rules, for any order of events."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from zrpc.errors import QueueClosed
from zrpc.services.queue.contents import Contents, Item, Waiter

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 9)),  # the size of the item
        st.tuples(st.just("take"), st.integers(1, 3)),  # the most items
        st.tuples(st.just("remove"), st.integers(0, 40)),
        st.tuples(st.just("give_back"), st.integers(0, 40)),
        st.tuples(st.just("keep"), st.integers(0, 40)),
        st.tuples(st.just("close"), st.just(0)),
    ),
    max_size=60,
)


class Watched:
    """Some contents, with all that ever waited for them."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.contents = Contents(max_items, max_bytes)
        self.max_items, self.max_bytes = max_items or math.inf, max_bytes or math.inf
        self.waiters: list[Waiter] = []
        self.waiting: list[Waiter] = []
        self.entered: list[int] = []  # the numbers of the items, in their order
        self.taken: list[int] = []
        self.returned = False

    def put(self, size: int) -> None:
        self._add(Waiter(items=[Item(len(self.waiters), size)]))

    def take(self, most: int) -> None:
        self._add(Waiter(most, batch=True))

    def _add(self, waiter: Waiter) -> None:
        waiter.done = self.note
        self.waiters.append(waiter)
        self.waiting.append(waiter)
        if self.contents.add(waiter):
            self.note(waiter)

    def remove(self, number: int) -> None:
        if number < len(self.waiters):
            waiter = self.waiters[number]
            if waiter in self.waiting:
                self.waiting.remove(waiter)
            self.contents.remove(waiter)

    def give_back(self, number: int) -> None:
        """A taker has not got its items."""
        if number < len(self.waiters) and self.waiters[number].most:
            items, self.waiters[number].items = self.waiters[number].items, []
            for item in items:
                self.taken.remove(item.value)
            self.returned |= bool(items)
            self.contents.give_back(items)

    def keep(self, number: int) -> None:
        """A taker has got its items, and it is known."""
        if number < len(self.waiters) and self.waiters[number].most:
            items, self.waiters[number].items = self.waiters[number].items, []
            self.contents.note_taken(len(items))

    @property
    def lent(self) -> bool:
        """Whether items may come back."""
        return any(waiter.items for waiter in self.waiters if waiter.most)

    def close(self, _: int) -> None:
        self.contents.close()

    def note(self, waiter: Waiter) -> None:
        """A call has its items, or an error."""
        self.waiting.remove(waiter)
        if waiter.error is not None:
            assert isinstance(waiter.error, QueueClosed)
            assert self.contents.closed
            assert not (waiter.most and self.lent)
        elif waiter.most:
            assert 1 <= len(waiter.items) <= waiter.most
            self.taken += [item.value for item in waiter.items]
        else:
            self.entered.append(waiter.items[0].value)

    def check(self) -> None:
        contents = self.contents
        left = [item.value for item in contents.items]
        # No item is lost, and none is taken twice.
        assert sorted(self.taken + left) == sorted(self.entered)
        assert contents.nbytes == sum(item.size for item in contents.items)
        if not self.returned:
            assert self.taken + left == self.entered  # first in, first out
            assert len(left) <= self.max_items
            assert contents.nbytes <= self.max_bytes or len(left) == 1
        takers = [waiter for waiter in self.waiting if waiter.most]
        putters = [waiter for waiter in self.waiting if not waiter.most]
        assert not (takers and left)
        assert not (putters and not left)
        assert not (contents.closed and (putters or (takers and not self.lent)))
        if putters:
            assert contents.full(putters[0].items[0].size)


@given(st.integers(0, 3), st.sampled_from([0, 8, 20]), EVENTS)
def test_items_leave_once_and_in_their_order(
    max_items: int, max_bytes: int, events: list[tuple[str, int]]
) -> None:
    watched = Watched(max_items, max_bytes)
    for name, value in events:
        getattr(watched, name)(value)
        watched.check()


def test_putters_do_not_pass_each_other() -> None:
    contents, done = Contents(0, 10), list[Waiter]()
    large, small = (Waiter(items=[Item("", size)], done=done.append) for size in (9, 1))
    assert contents.add(Waiter(items=[Item("first", 5)]))
    assert not contents.add(large)
    assert not contents.add(small)
    assert contents.add(Waiter(1))
    assert done == [large, small]


def test_a_closed_queue_fails_its_takers_once_no_item_can_come_back() -> None:
    contents, done = Contents(0, 0), list[Waiter]()
    first, second, third = (Waiter(1, done=done.append) for _ in range(3))
    contents.add(Waiter(items=[Item("item")]))
    assert contents.add(first)
    assert not contents.add(second)
    assert not contents.add(third)
    contents.close()
    assert not done
    contents.give_back(first.items)
    assert done == [second]
    assert second.result() == "item"
    contents.note_taken(1)
    assert done == [second, third]
    assert isinstance(third.error, QueueClosed)


def test_a_queue_that_is_closed_at_once_waits_for_no_item() -> None:
    contents, waiting = Contents(0, 0), Waiter(1)
    contents.add(Waiter(items=[Item("item")]))
    assert contents.add(Waiter(1))
    assert not contents.add(waiting)
    contents.close(at_once=True)
    assert isinstance(waiting.error, QueueClosed)
