"""Messages as bytes: written ones are read back, and anything else is refused."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.errors import ProtocolError
from zrpc.wire.message import HEADER_SIZE, VERSION, Message, parse

LAYOUT = struct.Struct("<BBHIIfQQ")

extensions = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=50)), max_size=4)
messages = st.builds(
    Message,
    kind=st.integers(0, 255),
    call_id=st.integers(0, 2**64 - 1),
    deadline=st.floats(0, 1e9, width=32),
    body=st.binary(max_size=200),
    table=st.binary(max_size=200),
    extensions=extensions,
)


@given(messages)
def test_a_written_message_is_read_back(message: Message) -> None:
    read = parse(message.first_frame(), ["buffer"], sender=3)
    assert (read.kind, read.call_id, read.deadline) == (
        message.kind,
        message.call_id,
        message.deadline,
    )
    assert bytes(read.body) == message.body
    assert bytes(read.table) == message.table
    assert list(read.extensions) == message.extensions
    assert read.buffers == ["buffer"]
    assert read.sender == 3


def test_the_order_of_the_parts() -> None:
    frame = Message(1, body=b"body", table=b"table", extensions=[(9, b"ext")]).first_frame()
    assert frame[HEADER_SIZE:] == b"\x09" + struct.pack("<I", 3) + b"ext" + b"table" + b"body"


def test_a_truncated_header_is_refused() -> None:
    for size in (0, 1, HEADER_SIZE - 1):
        with pytest.raises(ProtocolError, match=f"header of 32 bytes, found {size} bytes"):
            parse(Message(1).first_frame()[:size])


def test_another_version_is_refused_with_advice() -> None:
    for version in (0, VERSION + 1, 255):
        frame = bytes([version]) + Message(1).first_frame()[1:]
        with pytest.raises(
            ProtocolError, match=f"found version {version}: all workers must run the"
        ):
            parse(frame)


def test_a_deadline_that_is_no_time_is_refused() -> None:
    for deadline in (-1.0, math.inf, math.nan):
        with pytest.raises(ProtocolError, match=f"a deadline of {deadline} s"):
            parse(LAYOUT.pack(VERSION, 1, 0, 0, 0, deadline, 0, 0))


def test_an_extension_with_a_false_length_is_refused() -> None:
    frame = LAYOUT.pack(VERSION, 1, 0, 6, 0, 0.0, 0, 0) + struct.pack("<BI", 4, 2) + b"x"
    with pytest.raises(ProtocolError, match="extension 4 promises 2 bytes"):
        parse(frame)
    frame = LAYOUT.pack(VERSION, 1, 0, 3, 0, 0.0, 0, 0) + b"\x01\x00\x00"
    with pytest.raises(ProtocolError, match="expected an extension, found 3 bytes"):
        parse(frame)
