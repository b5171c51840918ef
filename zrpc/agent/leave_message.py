"""The message of a worker that leaves, or that tells a peer to leave."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from zrpc.errors import ProtocolError
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

__all__ = ["LeaveMessage"]

_LAYOUT = struct.Struct("<?Q")


@dataclass(frozen=True, slots=True)
class LeaveMessage:
    """The body of a LEAVE.

    Attributes:
        declared_dead: the sender has declared the receiver dead, and hears it all the same. Else
            the sender leaves by itself.
        sent: how many counted messages the sender has sent to the receiver, if it leaves with
            nothing left to do; else 0.

    Example:
        >>> LeaveMessage.parse(LeaveMessage(sent=3).pack().body)
        LeaveMessage(declared_dead=False, sent=3)
    """

    declared_dead: bool = False
    sent: int = 0

    def pack(self) -> Message:
        """Returns the message."""
        return Message(Kind.LEAVE, body=_LAYOUT.pack(self.declared_dead, self.sent))

    @classmethod
    def parse(cls, body: bytes | bytearray | memoryview) -> LeaveMessage:
        """Reads the body of a LEAVE.

        Raises:
            ProtocolError: it is none.
        """
        try:
            return cls(*_LAYOUT.unpack(body))
        except struct.error as error:
            raise ProtocolError(f"expected the body of a LEAVE: {error}") from error
