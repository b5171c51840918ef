"""What a stream's messages hold: batches of items one way, and credit for more the other way.

A batch has a number, since messages may overtake each other. Numbers, strings and the like can't be
changed by the generator. They are packed together, in one pickle, when they are sent. Any other
item is packed by itself, when it is yielded. One with large buffers, or with what a service adds to
it, is the last of its batch: the message has room for one such item.

The bytes of a batch are its number and its weight (uint64 each), and then its parts: the number of
items that are packed together, 0 for one that is packed by itself, the length of its tensor table
and of its pickle (uint32 each), and these two. The weight is the number of bytes that the producer
counts the batch for. Credit is three uint64: the batches that have arrived, the items that were
taken, and the weight of the batches that were opened.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zrpc.errors import ProtocolError, SerializationError
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

_NUMBER = struct.Struct("<Q")
_HEAD = struct.Struct("<QQ")
_PART = struct.Struct("<III")
_CREDIT = struct.Struct("<QQQ")
_MAX_PART_BYTES = 2**32 - 1
# Whether an item is packed already: without a function of Python's for each of many.
_is_packed = Message.__instancecheck__


class Credit(NamedTuple):
    """What a consumer has of a stream, each number counted from the stream's beginning.

    Attributes:
        received: the number of batches that have arrived.
        taken: the number of items that the program has taken.
        freed: the weight of the batches that were opened.
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


def check_size(item: Message) -> None:
    """Checks that a batch has room for an item that is packed by itself.

    Raises:
        SerializationError: the item is too large.
    """
    size = max(len(item.body), len(item.table))
    if size > _MAX_PART_BYTES:
        raise SerializationError(
            "expected an item of a stream whose pickle has less than 4 GiB, found one of "
            f"{size} bytes: yield it in parts, or as a tensor or an array, which don't count"
        )


def dump_batch(call_id: int, number: int, weight: int, items: Sequence[Any]) -> Message:
    """Returns the message with a batch.

    Args:
        call_id: of the stream.
        number: of the batch.
        weight: of the batch.
        items: messages with an item that is packed by itself, and values to be packed here.
    """
    parts: list[bytes | bytearray | memoryview] = [_HEAD.pack(number, weight)]
    batch = Message(Kind.ITEMS, call_id)
    for packed, group in itertools.groupby(items, _is_packed):
        if packed:
            for item in group:
                parts += (_PART.pack(0, len(item.table), len(item.body)), item.table, item.body)
                batch.buffers, batch.extensions = item.buffers, item.extensions
        else:
            values = list(group)
            body = pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
            parts += (_PART.pack(len(values), 0, len(body)), body)
    batch.body = b"".join(parts)
    return batch


def parse_head(batch: Message) -> tuple[int, int]:
    """Returns the number and the weight of a batch.

    Raises:
        ProtocolError: the message has none.
    """
    if len(batch.body) < _HEAD.size:
        raise ProtocolError(f"expected the head of a batch, found {len(batch.body)} bytes")
    number, weight = _HEAD.unpack_from(batch.body)
    return number, weight


def parts_of(batch: Message) -> Iterator[tuple[int, Message]]:
    """Yields the parts of a batch: a number of items, and a message with the list of them.

    The number is 0 if the message has one item, and no list.

    Raises:
        ProtocolError: the message ends too early.
    """
    view, at = memoryview(batch.body), _HEAD.size
    while at < len(view):
        start = at + _PART.size
        if start > len(view):
            raise ProtocolError(f"expected the head of an item, found {len(view) - at} bytes")
        count, table_size, size = _PART.unpack_from(view, at)
        middle, at = start + table_size, start + table_size + size
        if at > len(view):
            raise ProtocolError(f"an item promises {at - start} bytes, more than there are")
        part = Message(batch.kind, body=view[middle:at], table=view[start:middle])
        part.sender = batch.sender
        if at == len(view):
            part.buffers, part.attachments = batch.buffers, batch.attachments
        yield count, part


def dump_numbers(*numbers: int) -> bytes:
    """Returns the extension of a stream's request or answer.

    A request has the number of items and of bytes that the producer may be ahead, and whether the
    function may also be no generator; an answer has the number of batches before it.
    """
    return b"".join(map(_NUMBER.pack, numbers))


def read_numbers(_: Message, data: bytes) -> tuple[int, ...]:
    """Reads what `dump_numbers` wrote."""
    return tuple(number for (number,) in _NUMBER.iter_unpack(data))
