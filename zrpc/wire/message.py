"""The fixed part of a message, and how a message is laid out in frames.

The first frame holds the header, the extensions, the tensor table and the body, in this order.
Each further frame holds one buffer (a large tensor, an array). The header is read without pickle,
so a message can be refused before any of it is unpickled.

======== ====== ===================================================================
bytes    type   field
======== ====== ===================================================================
0        uint8  version of this layout
1        uint8  kind: which handler takes the message
2-3      uint16 reserved, 0
4-7      uint32 length of the extensions, in bytes
8-11     uint32 length of the tensor table, in bytes
12-15    float  seconds left until the caller's deadline; 0: no deadline
16-23    uint64 call id: the caller's number of the call, which the answer repeats
24-31    uint64 trace id, reserved, 0
======== ====== ===================================================================

All numbers are little-endian. A service adds extensions to a message, and reads them without
unpickling the body. An extension is a uint8 tag, a uint32 length, and bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zrpc.errors import ProtocolError
from zrpc.wire.member_id import NOBODY, MemberId

VERSION = 2
_HEADER = struct.Struct("<BBHIIfQQ")
_pack_header, _unpack_header = _HEADER.pack, _HEADER.unpack_from
_EXTENSION = struct.Struct("<BI")
_EXTENSION_SIZE = _EXTENSION.size
HEADER_SIZE = _HEADER.size
_NEVER = float("inf")

Buffer = bytes | bytearray | memoryview
Extensions = Sequence[tuple[int, bytes]]


@dataclass(slots=True)
class Message:
    """One message, as sent or as received.

    Attributes:
        kind: which handler takes the message.
        call_id: the caller's number of the call; 0 if there is none.
        deadline: seconds left until the caller's deadline; 0 if there is none.
        body: a pickle, or other bytes that the kind defines.
        table: the tensor table, itself a pickle; empty if it has no tensors.
        extensions: tags and bytes.
        buffers: further frames.
        sender: the member that sent it; set by the receiver.
        attachments: by tag, what the receiver's services made of the extensions.
        scope: the cancel scope of an accepted request, see `zrpc.calls.cancel_scope`.
        loaded: objects that are kept alive with the message; unset if there are none.
    """

    kind: int
    call_id: int = 0
    deadline: float = 0.0
    body: Buffer = b""
    table: Buffer = b""
    extensions: Extensions = ()
    buffers: Sequence[Any] = ()
    sender: MemberId = NOBODY
    attachments: dict[int, Any] | None = None
    scope: Any = None
    # Not set at first, since that would cost time for each message.
    loaded: list[Any] = field(init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """The size of the message in bytes, all frames together, without the header."""
        size = len(self.body) + len(self.table)
        if self.buffers:
            size += sum(memoryview(buffer).nbytes for buffer in self.buffers)
        return size

    def attachment(self, tag: int) -> Any:
        """Returns what this worker's services made of the extension with this tag.

        Raises:
            ProtocolError: the sender has not added the extension.
        """
        if self.attachments is None or tag not in self.attachments:
            raise ProtocolError(
                f"expected extension {tag} in a message of kind {self.kind}, found none"
            )
        return self.attachments[tag]

    def keep(self, value: Any) -> None:
        """Keeps ``value`` alive as long as the message; a request lives until it is answered."""
        self.loaded = [*getattr(self, "loaded", ()), value]

    def copy_buffers(self) -> None:
        """Copies the buffers, so that later changes of the values do not change the message.

        The copies are writable, since those get into shared memory faster.
        """
        self.buffers = [memoryview(bytearray(memoryview(buffer))) for buffer in self.buffers]

    def first_frame(self) -> bytes:
        """Returns the first of the frames; the buffers are the others."""
        extensions = b""
        if self.extensions:
            extensions = b"".join(
                [_EXTENSION.pack(tag, len(data)) + data for tag, data in self.extensions]
            )
        header = _pack_header(
            VERSION, self.kind, 0, len(extensions), len(self.table), self.deadline, self.call_id, 0
        )
        return b"".join((header, extensions, self.table, self.body))


def parse(first: Buffer, buffers: Sequence[Any] = (), sender: MemberId = NOBODY) -> Message:
    """Reads a message from its frames, without unpickling anything.

    Args:
        first: the first frame.
        buffers: the other frames.
        sender: the member that sent it.

    Raises:
        ProtocolError: the bytes are not a message of this version.
    """
    size = len(first)
    if size < HEADER_SIZE:
        raise ProtocolError(f"expected a header of {HEADER_SIZE} bytes, found {size} bytes")
    version, kind, _, extensions_size, table_size, deadline, call_id, _ = _unpack_header(first)
    if version != VERSION:
        raise ProtocolError(
            f"expected a message of version {VERSION}, found version {version}: "
            "all workers must run the same version of zrpc"
        )
    body_start = HEADER_SIZE + extensions_size + table_size
    if body_start > size or not 0 <= deadline < _NEVER:
        raise ProtocolError(
            f"the header promises {body_start} bytes or more and a deadline of {deadline} s, "
            f"but the frame has {size} bytes"
        )
    view = memoryview(first)
    message = Message(kind, call_id, deadline, view[body_start:], buffers=buffers, sender=sender)
    if body_start > HEADER_SIZE:
        table_start = body_start - table_size
        message.extensions = _parse_extensions(view[HEADER_SIZE:table_start])
        message.table = view[table_start:body_start]
    return message


def parse_head(first: Buffer, sender: MemberId = NOBODY) -> Message:
    """Reads the header of a message whose other bytes are lost.

    Args:
        first: the first frame, or the beginning of it.
        sender: the member that sent it.

    Raises:
        ProtocolError: the bytes are not the beginning of a message of this version.
    """
    # With neither extensions nor a tensor table.
    return parse(bytes(first[:4]) + bytes(8) + bytes(first[12:HEADER_SIZE]), (), sender)


def _parse_extensions(view: memoryview) -> Extensions:
    extensions = []
    end, length = 0, len(view)
    while end < length:
        start = end + _EXTENSION_SIZE
        if start > length:
            raise ProtocolError(f"expected an extension, found {length - end} bytes")
        tag, size = _EXTENSION.unpack_from(view, end)
        end = start + size
        if end > length:
            raise ProtocolError(f"extension {tag} promises {size} bytes, more than there are")
        extensions.append((tag, bytes(view[start:end])))
    return tuple(extensions)
