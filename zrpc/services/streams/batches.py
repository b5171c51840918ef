"""What a stream's messages hold: batches of items one way, and credit for more the other way.

A batch has a number, since messages may overtake each other. Its items are packed one by one, when
they are yielded, because the generator may change them afterwards. An item with large buffers, or
with what a service adds to it, is alone in its batch: the message has room for one such item.

The bytes of a batch are its number (uint64), and for each item the length of its tensor table and
of its pickle (uint32 each), and these two. Credit is three uint64: the batches that
have arrived, the items that were taken, and the bytes that were opened.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zrpc.errors import ProtocolError
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

__all__ = ["Credit", "dump_batch", "dump_numbers", "items_of", "number_of", "read_numbers"]

_NUMBER = struct.Struct("<Q")
_LENGTHS = struct.Struct("<II")
_CREDIT = struct.Struct("<QQQ")


class Credit(NamedTuple):
    """What a consumer has of a stream, each number counted from the stream's beginning.

    Attributes:
        received: the number of batches that have arrived.
        taken: the number of items that the program has taken.
        freed: the bytes of the batches that were opened.
    """

    received: int = 0
    taken: int = 0
    freed: int = 0

    def dump(self, call_id: int) -> Message:
        """Returns the message for the producer of a stream."""
        return Message(Kind.CREDIT, call_id, body=_CREDIT.pack(*self))

    @classmethod
    def parse(cls, message: Message) -> Credit:
        """Reads what `dump` wrote.

        Raises:
            ProtocolError: the message is something else.
        """
        if len(message.body) != _CREDIT.size:
            found = len(message.body)
            raise ProtocolError(f"expected {_CREDIT.size} bytes of credit, found {found}")
        return cls(*_CREDIT.unpack(message.body))


def dump_batch(call_id: int, number: int, items: Sequence[Message]) -> Message:
    """Returns the message with a batch of packed items."""
    parts: list[bytes | bytearray | memoryview] = [_NUMBER.pack(number)]
    for item in items:
        parts += (_LENGTHS.pack(len(item.table), len(item.body)), item.table, item.body)
    batch = Message(Kind.ITEMS, call_id, body=b"".join(parts))
    if items:
        batch.buffers, batch.extensions = items[-1].buffers, items[-1].extensions
    return batch


def number_of(batch: Message) -> int:
    """Returns the number of a batch.

    Raises:
        ProtocolError: the message has none.
    """
    if len(batch.body) < _NUMBER.size:
        raise ProtocolError(f"expected the number of a batch, found {len(batch.body)} bytes")
    number: int = _NUMBER.unpack_from(batch.body)[0]
    return number


def items_of(batch: Message) -> Iterator[Message]:
    """Yields the items of a batch, each as a message that can be unpacked.

    Raises:
        ProtocolError: the message ends too early.
    """
    view, at = memoryview(batch.body), _NUMBER.size
    while at < len(view):
        start = at + _LENGTHS.size
        if start > len(view):
            raise ProtocolError(f"expected the lengths of an item, found {len(view) - at} bytes")
        table_size, size = _LENGTHS.unpack_from(view, at)
        middle, at = start + table_size, start + table_size + size
        if at > len(view):
            raise ProtocolError(f"an item promises {at - start} bytes, more than there are")
        yield Message(
            batch.kind,
            body=view[middle:at],
            table=view[start:middle],
            buffers=batch.buffers,
            sender=batch.sender,
            attachments=batch.attachments,
        )


def dump_numbers(*numbers: int) -> bytes:
    """Returns the extension of a stream's request or answer.

    A request has the number of items and of bytes that the producer may be ahead, and whether the
    function may also be no generator; an answer has the number of batches before it.
    """
    return b"".join(map(_NUMBER.pack, numbers))


def read_numbers(_: Message, data: bytes) -> tuple[int, ...]:
    """Reads what `dump_numbers` wrote."""
    return tuple(number for (number,) in _NUMBER.iter_unpack(data))
