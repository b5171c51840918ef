"""The rules of a stream's producer: how far it may run, and which items it sends together.

No I/O in here. The producer may be ahead of its consumer by a number of items, and by the bytes of
flow control. At its limit it *rests*, until credit for more has come. The thread that runs the
generator leaves it by ``rest()``, and the one that finds ``wake()`` true lets it run on. So there
is always one thread, or none, that runs it.

An item is sent at once if nothing else is on the way, or if it has buffers that the generator may
change. Otherwise it waits until what was sent has arrived, and is sent with those that were made
meanwhile. So a slow stream has no delay, and a quick one has large messages: the further behind its
consumer is, the larger.
"""

from __future__ import annotations

from enum import Enum, auto
from time import monotonic
from typing import Any

from zrpc.services.streams.batches import Credit
from zrpc.wire.message import Message

_MAX_BATCH_BYTES = 1 << 16
# What an item takes beside its own bytes.
_ITEM_BYTES = 64
# An item is not kept back for longer than this if the generator goes on.
_MAX_DELAY_SECONDS = 0.001


class Step(Enum):
    """What the thread that runs a generator must do next."""

    GO = auto()  # make an item
    REST = auto()  # leave it, until `Outflow.wake`
    CLOSE = auto()  # close it


class Outflow:
    """What the producer of one stream may do. For one thread at a time.

    Args:
        prefetch: the number of items that it may be ahead of its consumer.
        max_bytes: the bytes that it may be ahead; a single item may be larger. 0: no limit.

    Attributes:
        closing: whether the generator must be closed.
        ended: whether it has ended.
        total: the number of batches that were sent.
        rests_since: since when it has rested, on the clock of ``time.monotonic``; 0 if it does not.
    """

    def __init__(self, prefetch: int, max_bytes: int) -> None:
        self._prefetch = prefetch
        self._max_bytes = max_bytes or float("inf")
        self._batch_length = max(1, prefetch // 2)
        self.closing = self.ended = False
        self.total = 0
        self.rests_since = 0.0
        self._credit = Credit()
        self._made = 0
        self._bytes = 0  # of all items
        self._unsent: list[Any] = []
        self._unsent_bytes = 0
        self._sent_at = 0.0

    def next_step(self) -> Step:
        """Returns what the thread that runs the generator must do."""
        if self.closing:
            return Step.CLOSE
        return Step.GO if self._has_credit() else Step.REST

    def rest(self) -> bool:
        """Returns whether the thread that runs the generator must leave it, until `wake`."""
        if self.next_step() is not Step.REST:
            return False
        self.rests_since = monotonic()
        return True

    def _has_credit(self) -> bool:
        credit = self._credit
        ahead, ahead_bytes = self._made - credit.taken, self._bytes - credit.freed
        return ahead < self._prefetch and ahead_bytes < self._max_bytes

    def add(self, item: Any, size: int) -> bool:
        """Adds an item that was made; returns False if the next one may be made at once.

        Otherwise `take` must be called now, and then `next_step`.

        Args:
            item: a message, or a value that the generator can't change.
            size: its bytes.
        """
        size += _ITEM_BYTES
        self._made += 1
        self._bytes += size
        self._unsent_bytes += size
        self._unsent.append(item)
        credit = self._credit
        return (
            credit.received == self.total
            or self._unsent_bytes >= _MAX_BATCH_BYTES
            or len(self._unsent) >= self._batch_length
            or self.closing
            or self._made - credit.taken >= self._prefetch
            or self._bytes - credit.freed >= self._max_bytes
            or monotonic() - self._sent_at > _MAX_DELAY_SECONDS
            or (type(item) is Message and bool(item.buffers or item.extensions))
        )

    def take(self) -> tuple[int, int, list[Any]] | None:
        """Takes out the next batch to send: its number, weight and items; None if there is none."""
        if not self._unsent:
            return None
        batch = self.total, self._unsent_bytes, self._unsent
        self._unsent, self._unsent_bytes = [], 0
        self._sent_at = monotonic()
        self.total += 1
        return batch

    def give(self, credit: Credit) -> bool:
        """Takes credit of the consumer; returns whether `take` must be called now.

        Older credit may come after newer one.
        """
        self._credit = Credit(*map(max, credit, self._credit))
        return bool(self._unsent) and self._credit.received >= self.total

    def wake(self) -> bool:
        """Returns whether the generator rests and must go on; then a thread must run it."""
        if not self.rests_since or self.ended or not (self.closing or self._has_credit()):
            return False
        self.rests_since = 0.0
        return True

    def cut(self, number: int) -> None:
        """Ends the stream before a batch that could not be sent."""
        self.total = min(self.total, number)
        self._unsent = []
        self.closing = True
