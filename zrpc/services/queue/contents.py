"""What is in a queue, and who waits for it. No I/O in here.

Items leave in the order in which they came. Takers wait in a line, and so do putters: nobody
passes another one. A queue is bounded by the number of its items and by their bytes. An item that
is larger than the bound enters when the queue is empty.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zrpc.errors import QueueClosed
from zrpc.runtime.interrupts import UninterruptedLock


@dataclass(slots=True, eq=False)
class Item:
    """A value in the queue.

    Attributes:
        value: the value.
        size: in bytes.
    """

    value: Any
    size: int = 0


def nothing(_: Waiter) -> None:
    """What is called for a waiter of whom nobody needs to be told."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that puts an item, or that takes some.

    Attributes:
        most: how many items it takes at most; 0 if it puts one.
        batch: whether it takes a list of items.
        timeout: for how many seconds it waits at most; None for no limit.
        due: when that time is over, for `zrpc.services.queue.service`.
        items: those that it puts, or was given.
        error: what it failed with.
        done: called once it has its items, or an error, by what has brought that about.
    """

    most: int = 0
    batch: bool = False
    timeout: float | None = None
    due: float = 0.0
    items: list[Item] = field(default_factory=list)
    error: BaseException | None = None
    done: Callable[[Waiter], None] = nothing

    def result(self) -> Any:
        """Returns what the call returns, or raises its error."""
        if self.error is not None:
            raise self.error
        if not self.most:
            return None
        return [item.value for item in self.items] if self.batch else self.items[0].value


class Contents:
    """The items of a queue, and those that wait. Any thread may call its methods.

    Each event lets those go on, by `Waiter.done`, that now have what they waited for, or an error.

    Args:
        max_items: the most items; 0 for no limit.
        max_bytes: the most bytes of all items together; 0 for no limit.

    Attributes:
        items: the oldest first.
        nbytes: of all items.
        closed: whether it takes no more items.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        # Guards what follows. No other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self.items: deque[Item] = deque()
        self.nbytes = 0
        self.closed = False
        self._lent = 0  # the items that were given, and may come back
        self._takers: deque[Waiter] = deque()
        self._putters: deque[Waiter] = deque()

    def full(self, size: int = 0) -> bool:
        """Returns whether an item of this size, in bytes, has to wait."""
        if not self.items:
            return False
        return (0 < self._max_items <= len(self.items)) or (
            0 < self._max_bytes < self.nbytes + max(1, size)
        )

    def add(self, waiter: Waiter) -> bool:
        """Takes a call that puts or takes; it fails at once if it must not wait.

        Returns:
            Whether it is done at once. Then it is not told.
        """
        with self._lock:
            self._line_of(waiter).append(waiter)
            done = self._match()
            if waiter.timeout == 0 and waiter not in done:
                done += self._remove(waiter, late(waiter))
        _tell([each for each in done if each is not waiter])
        return waiter in done

    def remove(self, waiter: Waiter, error: BaseException | None = None) -> None:
        """Removes a call that waits no longer, if it still does; with an error, it is told."""
        with self._lock:
            done = self._remove(waiter, error)
        _tell(done)

    def give_back(self, items: Sequence[Item]) -> None:
        """Puts items back to the front: their taker has not got them."""
        with self._lock:
            self.items.extendleft(reversed(items))
            self.nbytes += _size(items)
            self._lent -= len(items)
            done = self._match()
        _tell(done)

    def note_taken(self, count: int) -> None:
        """Notes that some of the items that were given can't come back."""
        with self._lock:
            self._lent -= count
            done = self._match()
        _tell(done)

    def close(self, at_once: bool = False) -> None:
        """Takes no more items. Those that there are can be taken.

        Args:
            at_once: whether takers do not wait for items that might come back.
        """
        with self._lock:
            self.closed = True
            if at_once:
                self._lent = 0
            done = self._match()
        _tell(done)

    def _line_of(self, waiter: Waiter) -> deque[Waiter]:
        return self._takers if waiter.most else self._putters

    def _remove(self, waiter: Waiter, error: BaseException | None) -> list[Waiter]:
        line = self._line_of(waiter)
        if waiter not in line:
            return []
        line.remove(waiter)
        waiter.error = error
        return [*([] if error is None else [waiter]), *self._match()]

    def _match(self) -> list[Waiter]:
        done: list[Waiter] = []
        while True:
            if self._takers and self.items:
                done.append(self._give(self._takers.popleft()))
            elif self._putters and not self.closed and not self.full(_size(self._putters[0].items)):
                putter = self._putters.popleft()
                self.items.extend(putter.items)
                self.nbytes += _size(putter.items)
                done.append(putter)
            else:
                break
        if self.closed:  # and no items are left, if there are takers; but some may come back
            for line in (self._putters,) if self._lent > 0 else (self._takers, self._putters):
                for waiter in line:
                    waiter.error = _closed(waiter)
                done += line
                line.clear()
        return done

    def _give(self, taker: Waiter) -> Waiter:
        count = min(taker.most, len(self.items))
        taker.items = [self.items.popleft() for _ in range(count)]
        self.nbytes -= _size(taker.items)
        self._lent += count
        return taker


def _size(items: Sequence[Item]) -> int:
    return sum(item.size for item in items)


def _tell(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        waiter.done(waiter)


def late(waiter: Waiter) -> BaseException:
    """Returns the error of a call that has waited for as long as it may."""
    return queue.Empty() if waiter.most else queue.Full()


def _closed(waiter: Waiter) -> QueueClosed:
    if waiter.most:
        return QueueClosed("the queue is closed, and all its items are taken")
    return QueueClosed("the queue is closed and takes no more items")
