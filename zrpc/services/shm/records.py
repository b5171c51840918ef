"""What messages say of segments of shared memory, as bytes."""

from __future__ import annotations

import struct
from enum import IntEnum

__all__ = ["NOTE", "NUMBER", "PLACE", "RECORD", "Verb", "read_records"]

PLACE = struct.Struct("<QQ")  # offset and size of a buffer
NOTE = struct.Struct("<BQ")  # verb, number of the segment
NUMBER = struct.Struct("<Q")  # number of a segment
RECORD = struct.Struct("<QQ")  # number of a shared segment, how many places follow


class Verb(IntEnum):
    """What a note about a segment says."""

    RETURN = 1  # use this segment again
    KEEP = 2  # never use this segment again: I may read it without limit, or can't open it
    CLOSED = 3  # this segment is not lent again


def read_records(data: bytes) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns the numbers of the shared segments that a message names, each with its places."""
    found, start = [], 0
    while start < len(data):
        number, count = RECORD.unpack_from(data, start)
        start += RECORD.size
        end = start + count * PLACE.size
        found.append((number, list(PLACE.iter_unpack(data[start:end]))))
        start = end
    return found
