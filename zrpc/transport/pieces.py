"""Large frames in pieces, so that a small limit on frames limits no message.

An inbox that listens on tcp accepts no frame above ``LARGEST_FRAME`` (ZMQ_MAXMSGSIZE): ZeroMQ holds
a frame in memory until all of it is there, and does so also before it knows whose it is. So a
stranger's connection holds a megabyte at most. A larger frame travels as several:

- a frame of exactly ``PIECE`` bytes goes on with the next frame;
- any other is the last of its pieces, or a whole one.

So what happens to be as long as a piece is followed by an empty one. Where there is no limit (a
Unix socket), nothing else is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["LARGEST_FRAME", "PIECE", "cut", "joined", "marked"]

# A size that hardly any tensor has.
PIECE = 2**20 - 1024
# What CURVE adds, and more.
LARGEST_FRAME = PIECE + 512


def cut(frames: Iterable[Any]) -> list[Any]:
    """The frames in pieces."""
    pieces: list[Any] = []
    for frame in frames:
        size = memoryview(frame).nbytes
        if size < PIECE:
            pieces.append(frame)
        else:
            view = memoryview(frame).cast("B")
            pieces.extend(view[start : start + PIECE] for start in range(0, size + 1, PIECE))
    return pieces


def marked(frames: Iterable[Any]) -> list[Any]:
    """The frames as they are, with the mark of its end behind one that looks like a piece."""
    pieces: list[Any] = []
    for frame in frames:
        pieces.append(frame)
        if memoryview(frame).nbytes == PIECE:
            pieces.append(b"")
    return pieces


def joined(piece: Any, more: Callable[[], bool], receive: Callable[[], Any]) -> Any:
    """The frame that begins with a piece of `PIECE` bytes.

    Args:
        piece: the first.
        more: whether there are further frames of the same message.
        receive: gives the next one. One that is missing, as no sender of ours has it, ends the
            frame.
    """
    rest = receive() if more() else b""
    if not len(rest):
        return piece
    whole = bytearray(piece)
    while True:
        whole += memoryview(rest)
        if len(rest) != PIECE or not more():
            return whole
        rest = receive()
