"""The rules of a stream's consumer: the order of its batches, its end, and the credit it gives.

No I/O in here. Messages may overtake each other. So batches are numbered, and the end of a stream
says how many there are: whatever ends it, an error too, comes after the items before it.

The consumer reports each batch that arrives, and then what the program has taken. It also reports
that when half of the limits are free again, because the producer may rest until then.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from zrpc.errors import ProtocolError
from zrpc.services.streams.batches import Credit, parse_head
from zrpc.wire.message import Message


class Inflow:
    """What the consumer of one stream has. For one thread at a time.

    Args:
        prefetch: the number of items that the producer may be ahead.
        max_bytes: the bytes that it may be ahead; 0: no limit.

    Attributes:
        outcome: a list with what has ended the stream; empty before that.
    """

    def __init__(self, prefetch: int, max_bytes: int) -> None:
        self._least_items = max(1, prefetch // 2)
        self._least_bytes = max(1, max_bytes // 2) if max_bytes else float("inf")
        self.outcome: list[Any] = []
        self._total: int | None = None
        self._early: dict[int, Message] = {}
        self._ready: deque[Message] = deque()
        self._arrived = 0  # all batches before this number
        self._received = 0  # batches, in whichever order
        self._opened = 0  # items
        self._freed = 0  # the weight of what was opened
        self._reported = Credit()

    @property
    def complete(self) -> bool:
        """Whether nothing more can arrive."""
        return self._total is not None and self._arrived >= self._total

    @property
    def over(self) -> bool:
        """Whether all has been opened, so that the program gets the outcome next."""
        return self.complete and not self._ready

    @property
    def ready(self) -> bool:
        """Whether there is a batch to open, or the outcome."""
        return bool(self._ready) or self.complete

    def arrive(self, batch: Message) -> None:
        """Takes a batch that has arrived.

        Raises:
            ProtocolError: there was one with this number before, or it is no batch.
        """
        number, _ = parse_head(batch)
        if self.complete:
            return
        if number < self._arrived or number in self._early:
            raise ProtocolError(f"expected batch {self._arrived} of a stream, found {number} again")
        self._received += 1
        self._early[number] = batch
        while self._arrived != self._total and self._arrived in self._early:
            self._ready.append(self._early.pop(self._arrived))
            self._arrived += 1
        if self.complete:
            self._early.clear()

    def end(self, outcome: Any, total: int | None = None) -> None:
        """Notes what ends the stream; a loss may also end one whose last batches are on the way.

        Args:
            outcome: an answer or an error.
            total: the number of batches before it; None for those that have arrived in order.
        """
        if self.complete or (self.outcome and total is not None):
            return
        self.outcome = [outcome]
        self._total = self._arrived if total is None else max(total, self._arrived)
        if self.complete:
            self._early.clear()

    def abort(self, outcome: Any) -> object:
        """Ends the stream at once; returns what has not been opened, to be freed without a lock."""
        dropped = self._ready, self._early
        self.outcome = [outcome]
        self._total = self._arrived
        self._ready, self._early = deque(), {}
        return dropped

    def first(self) -> Message | None:
        """Returns the batch to open next; None if it has not arrived."""
        return self._ready[0] if self._ready else None

    def open(self, count: int) -> None:
        """Takes out the first batch, which had this number of items."""
        _, weight = parse_head(self._ready.popleft())
        self._freed += weight
        self._opened += count

    def credit(self, left: int, always: bool = False) -> Credit | None:
        """Returns the credit to send to the producer; None if there is too little to report.

        Args:
            left: the number of opened items that the program has not taken.
            always: whether to report however little it is: a batch has arrived.
        """
        found = Credit(self._received, self._opened - left, self._freed)
        if not (
            always
            or found.taken - self._reported.taken >= self._least_items
            or found.freed - self._reported.freed >= self._least_bytes
        ):
            return None
        self._reported = found
        return found
