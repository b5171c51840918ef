"""The part of ZMTP 3, ZeroMQ's protocol, that a relay needs: where messages begin and end.

See https://rfc.zeromq.org/spec/23/: a stream is a greeting of 64 bytes, then frames. A frame is a
byte of flags, the length in one byte or in eight, and the content. A message is one or more frames;
a command is a frame of its own. The first command, READY, holds the routing id.
"""

from __future__ import annotations

from asyncio import StreamReader
from typing import NamedTuple

GREETING = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_READY = b"\x05READY"


class Unit(NamedTuple):
    """A message, or a command.

    Attributes:
        data: all of its bytes.
        is_message: whether it is a message.
        routing_id: of the side that sends it, if it is a READY; empty if that side has none.
    """

    data: bytes
    is_message: bool
    routing_id: bytes | None = None


class Units:
    """What follows the greeting that one side of a connection sends."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._message = b""  # the frames of an incomplete message

    async def read(self) -> Unit:
        """Reads the next one. No byte is lost or changed.

        Raises:
            EOFError: the stream has ended.
        """
        while True:
            head = await self._reader.readexactly(2)
            if head[0] & _LONG:
                head += await self._reader.readexactly(7)
            content = await self._reader.readexactly(int.from_bytes(head[1:], "big"))
            if head[0] & _COMMAND:
                return Unit(head + content, False, _routing_id(content))
            self._message += head + content
            if not head[0] & _MORE:
                message, self._message = self._message, b""
                return Unit(message, True)


def _routing_id(command: bytes) -> bytes | None:
    found, at = b"", len(_READY)
    if not command.startswith(_READY):
        return None
    while at < len(command):
        name = command[at + 1 : at + 1 + command[at]]
        at += 1 + len(name)
        size = int.from_bytes(command[at : at + 4], "big")
        if name == b"Identity":
            found = command[at + 4 : at + 4 + size]
        at += 4 + size
    return found
