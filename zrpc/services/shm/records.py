"""What messages say of segments of shared memory, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

Place = tuple[int, int]  # offset and size of a buffer

NOTE = struct.Struct("<BQ")  # verb, number of the segment
_RECORD = struct.Struct("<QQ")  # number of a segment, how many places follow
_PLACE = struct.Struct("<QQ")


class Verb(IntEnum):
    """What a note about a segment says."""

    RETURN = 1  # use this segment again
    KEEP = 2  # never use this segment again: I may read it without limit, or can't open it
    CLOSED = 3  # this segment is not lent again


def record(number: int, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Returns what a message says of the buffers that it has in one segment."""
    return b"".join((_RECORD.pack(number, len(sizes)), *map(_PLACE.pack, offsets, sizes)))


def read_records(data: bytes) -> list[tuple[int, list[Place]]]:
    """Returns the numbers of the segments that a message names, each with its places."""
    found, start = [], 0
    while start < len(data):
        number, count = _RECORD.unpack_from(data, start)
        start += _RECORD.size
        end = start + count * _PLACE.size
        found.append((number, list(_PLACE.iter_unpack(data[start:end]))))
        start = end
    return found
