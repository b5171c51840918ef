"""The splitter finds where ZeroMQ's messages begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.testing.faults.zmtp import GREETING, Splitter

Frames = st.lists(st.lists(st.binary(max_size=400), min_size=1, max_size=4), max_size=6)


def encoded(frame: bytes, more: bool = False, command: bool = False) -> bytes:
    flags = more | 4 * command
    if len(frame) < 256:
        return bytes([flags, len(frame)]) + frame
    return bytes([flags | 2]) + len(frame).to_bytes(8, "big") + frame


def ready(identity: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    body += b"\x08Identity" + len(identity).to_bytes(4, "big") + identity
    return encoded(body, command=True)


@pytest.mark.system
@given(messages=Frames, identity=st.binary(max_size=40), cuts=st.lists(st.integers(1, 700)))
def test_a_stream_is_split_alike_in_any_pieces(
    messages: list[list[bytes]], identity: bytes, cuts: list[int]
) -> None:
    wire = [
        b"".join(encoded(f, more=i < len(frames) - 1) for i, f in enumerate(frames))
        for frames in messages
    ]
    ping = encoded(b"\x04PING\0\0", command=True)
    stream = b"g" * GREETING + ready(identity) + ping.join([b"", *wire])
    splitter, units, rest = Splitter(), [], stream
    for size in [*cuts, len(stream)]:
        units += splitter.feed(rest[:size])
        rest = rest[size:]
    assert b"".join(unit.data for unit in units) == stream
    assert [unit.data for unit in units if unit.is_message] == wire
    assert splitter.ready
    assert splitter.identity == identity
