"""The part of ZMTP 3, ZeroMQ's protocol, that a relay needs: where messages begin and end.

Does no I/O. See https://rfc.zeromq.org/spec/23/: a stream is a greeting of 64 bytes, then frames.
A frame is a byte of flags, the length in one byte or in eight, and the content. A message is one
or more frames; a command is a frame of its own. The first command, READY, holds the routing id.
"""

from __future__ import annotations

from typing import NamedTuple

GREETING = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_READY = b"\x05READY"


class Unit(NamedTuple):
    """A piece of a stream: a message, or the bytes between two messages."""

    data: bytes
    is_message: bool


class Splitter:
    """A splitter of the bytes that one side of a connection sends.

    Attributes:
        ready: whether that side's READY has arrived.
        identity: that side's routing id; empty if it has none.
    """

    def __init__(self) -> None:
        self.ready = False
        self.identity = b""
        self._greeted = 0
        self._buffer = bytearray()
        self._message = bytearray()  # the frames of an incomplete message

    def feed(self, data: bytes) -> list[Unit]:
        """Takes the next bytes; returns the units they complete. No byte is lost or changed."""
        units: list[Unit] = []
        if self._greeted < GREETING:
            greeting = data[: GREETING - self._greeted]
            self._greeted += len(greeting)
            units.append(Unit(greeting, False))
            data = data[len(greeting) :]
        self._buffer += data
        start = 0
        while (frame := self._frame(start)) is not None:
            flags, content, end = frame
            whole = bytes(memoryview(self._buffer)[start:end])
            if flags & _COMMAND:
                self._on_command(whole[content - start :])
                units.append(Unit(whole, False))
            else:
                self._message += whole
                if not flags & _MORE:
                    units.append(Unit(bytes(self._message), True))
                    self._message.clear()
            start = end
        del self._buffer[:start]
        return units

    def _frame(self, start: int) -> tuple[int, int, int] | None:
        """Returns a frame's flags, and where its content begins and ends; None if incomplete."""
        have = len(self._buffer) - start
        if have < 2:
            return None
        flags = self._buffer[start]
        header = 9 if flags & _LONG else 2
        if have < header:
            return None
        size = int.from_bytes(self._buffer[start + 1 : start + header], "big")
        end = start + header + size
        return (flags, start + header, end) if end <= len(self._buffer) else None

    def _on_command(self, body: bytes) -> None:
        if self.ready or not body.startswith(_READY):
            return
        self.ready = True
        at = len(_READY)
        while at < len(body):
            name = body[at + 1 : at + 1 + body[at]]
            at += 1 + len(name)
            size = int.from_bytes(body[at : at + 4], "big")
            if name == b"Identity":
                self.identity = body[at + 4 : at + 4 + size]
            at += 4 + size
