"""The message of a worker that leaves, or that tells a peer to leave."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from zrpc.errors import ProtocolError
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

__all__ = ["LeaveMessage"]

_LAYOUT = struct.Struct("<?Q")  # and then the address that was tried


@dataclass(frozen=True, slots=True)
class LeaveMessage:
    """The body of a LEAVE.

    Attributes:
        declared_dead: the sender has declared the receiver dead. Else the sender leaves by itself.
        sent: how many counted messages the sender has sent to the receiver, if it leaves with
            nothing left to do; else 0.
        tried: the receiver's address if the sender could never connect to it; else empty.

    Example:
        >>> LeaveMessage.parse(LeaveMessage(sent=3).pack().body)
        LeaveMessage(declared_dead=False, sent=3, tried='')
    """

    declared_dead: bool = False
    sent: int = 0
    tried: str = ""

    def pack(self) -> Message:
        """Returns the message."""
        body = _LAYOUT.pack(self.declared_dead, self.sent) + self.tried.encode()
        return Message(Kind.LEAVE, body=body)

    @classmethod
    def parse(cls, body: bytes | bytearray | memoryview) -> LeaveMessage:
        """Reads the body of a LEAVE.

        Raises:
            ProtocolError: it is none.
        """
        try:
            declared_dead, sent = _LAYOUT.unpack_from(body)
            return cls(declared_dead, sent, bytes(body[_LAYOUT.size :]).decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError(f"expected the body of a LEAVE: {error}") from error
