"""What workers send each other for the reference count: ids, messages and forks, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import starmap
from typing import NamedTuple

from zrpc.errors import expecting
from zrpc.wire.member_id import MemberId, incarnation_of, rank_of

_LAYOUT = struct.Struct("<BQIQIQIQ")
_FORK_LAYOUT = struct.Struct("<IQIQIIQ")
FORK_SIZE = _FORK_LAYOUT.size
# At most this many reference messages are sent as one: its receiver does nothing else meanwhile.
_MAX_BATCH_LENGTH = 256


class GloballyUniqueId(NamedTuple):
    """An id that is unique in a mesh.

    Attributes:
        created_on: the member that drew the id; each incarnation of a worker is another member.
        local_id: a counter of that member's.
    """

    created_on: MemberId
    local_id: int

    def __repr__(self) -> str:
        incarnation = incarnation_of(self.created_on)
        suffix = f", incarnation={incarnation}" if incarnation else ""
        rank = rank_of(self.created_on)
        return f"GloballyUniqueId(created_on={rank}{suffix}, local_id={self.local_id})"


# The value that is referred to, and one user's reference to it.
RRefId = GloballyUniqueId
ForkId = GloballyUniqueId

# Stands for "no fork" in a message: no member has this id.
NO_FORK = GloballyUniqueId(MemberId(2**32 - 1), 0)

_ID = struct.Struct("<IQ")
# The two fields of an id, as bytes. Each call of a method needs it, so it is no method.
pack_id = _ID.pack


def pack_ids(ids: Iterable[GloballyUniqueId]) -> bytes:
    """Returns ids as bytes."""
    return b"".join(starmap(pack_id, ids))


def read_ids(_message: object, data: bytes) -> list[GloballyUniqueId]:
    """Returns the ids in the extension of a message.

    Raises:
        struct.error: the bytes are not a sequence of ids.
    """
    return list(starmap(GloballyUniqueId, _ID.iter_unpack(data)))


class Verb(IntEnum):
    """The meaning of a message; see `zrpc.services.rref.protocol`."""

    ADD = 1
    ADDED = 2
    DELETE = 3
    RESEND = 4
    CHECK = 5


class ReferenceMessage(NamedTuple):
    """One message of the protocol.

    Attributes:
        verb: its meaning.
        serial: its number among those from its sender to its receiver, from 0.
        rref_id: the value.
        fork_id: the fork. The member that handed it on has drawn its id. For RESEND, its number is
            the serial of the first message that is missing.
        parent_id: for ADD and CHECK, that member's own fork.
    """

    verb: Verb
    serial: int
    rref_id: RRefId
    fork_id: ForkId
    parent_id: ForkId = NO_FORK

    def pack(self) -> bytes:
        """Returns the message as bytes."""
        ids = (*self.rref_id, *self.fork_id, *self.parent_id)
        return _LAYOUT.pack(self.verb, self.serial, *ids)

    @classmethod
    @expecting("reference-count messages")
    def parse_all(cls, data: bytes | bytearray | memoryview) -> list[ReferenceMessage]:
        """Returns the messages that were packed one after the other.

        Raises:
            ProtocolError: the bytes are not a sequence of messages.
        """
        unique = GloballyUniqueId
        return [
            cls(Verb(verb), serial, unique(a, b), unique(c, d), unique(e, f))
            for verb, serial, a, b, c, d, e, f in _LAYOUT.iter_unpack(data)
        ]


def bodies(
    messages: Iterable[tuple[MemberId, ReferenceMessage]],
) -> Iterator[tuple[MemberId, bytes]]:
    """Packs messages to members, those to one of them together as far as possible."""
    packed: dict[MemberId, list[bytes]] = {}
    for member, message in messages:
        packed.setdefault(member, []).append(message.pack())
    for member, parts in packed.items():
        for start in range(0, len(parts), _MAX_BATCH_LENGTH):
            yield member, b"".join(parts[start : start + _MAX_BATCH_LENGTH])


class Fork(NamedTuple):
    """The part of a reference that travels beside a message's pickle.

    Attributes:
        rref_id: the value.
        fork_id: the child's.
        owner: the member that owns the value.
        parent_id: the sender's own fork; `NO_FORK` if the sender is the owner.
    """

    rref_id: RRefId
    fork_id: ForkId
    owner: MemberId
    parent_id: ForkId = NO_FORK

    def pack(self) -> bytes:
        """Returns the fork as bytes."""
        return _FORK_LAYOUT.pack(*self.rref_id, *self.fork_id, self.owner, *self.parent_id)

    @classmethod
    @expecting(f"forks of {FORK_SIZE} bytes each")
    def unpack_all(cls, data: bytes) -> list[Fork]:
        """Returns the forks that were packed one after the other.

        Raises:
            ProtocolError: the bytes are not a sequence of forks.
        """
        unique = GloballyUniqueId
        return [
            cls(unique(a, b), unique(c, d), owner, unique(e, f))
            for a, b, c, d, owner, e, f in _FORK_LAYOUT.iter_unpack(data)
        ]
