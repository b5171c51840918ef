"""Messages in a stream of bytes, however it is cut."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.errors import ProtocolError
from zrpc.transport.chunks import head_of_remnant
from zrpc.transport.framing import MAX_MESSAGE_BYTES, Unpacker, header

MESSAGES = st.lists(st.tuples(st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=4)))


def packed(first: bytes, buffers: Sequence[Any] = ()) -> bytes:
    return b"".join((header(first, buffers), first, *buffers))


def fed(unpacker: Unpacker, data: bytes | bytearray) -> list[Any]:
    messages: list[Any] = []
    unpacker.feed(memoryview(data), messages)
    return messages


@pytest.mark.system
@given(MESSAGES, st.data())
def test_messages_are_found_wherever_the_stream_is_cut(
    messages: list[Any], data: st.DataObject
) -> None:
    whole = b"".join(packed(*message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    unpacker, found = Unpacker(), []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += fed(unpacker, whole[start:stop])
    assert [(first, list(buffers)) for first, buffers in found] == messages


@pytest.mark.system
def test_a_large_message_in_small_pieces_is_fast() -> None:
    data, unpacker, found = packed(b"first", [bytes(MAX_MESSAGE_BYTES - 100)]), Unpacker(), []
    begun = time.process_time()
    for at in range(0, len(data), 4):  # copying what has arrived each time would copy 128 GiB
        found += fed(unpacker, data[at : at + 4])
    assert time.process_time() - begun < 2
    assert [(first, len(buffers[0])) for first, buffers in found] == [
        (b"first", MAX_MESSAGE_BYTES - 100)
    ]


@pytest.mark.system
@pytest.mark.parametrize("cut", [13, 200, 5000, 1 << 20])
def test_each_lack_of_memory_loses_one_message_at_most(cut: int) -> None:
    """Python lets any allocation fail, one after the other."""
    memory = pytest.importorskip("_testcapi", reason="this Python is built without it")
    sent: list[Any] = [
        (b"a" * 40, [b"x" * 300, b"y" * 900]),
        (b"b" * 3000, []),
        (b"c", []),
        (b"d" * 20, [b"z" * 7000]),
        (b"", [b""] * 20),
        (b"e" * 1000, []),
    ]
    whole = b"".join(packed(*message) for message in sent)
    pieces = [memoryview(whole[at : at + cut]) for at in range(0, len(whole), cut)]
    for number in range(0, len(pieces), -(-len(pieces) // 40)):
        for allocation in range(60):  # a piece needs fewer
            found = list[Any]()
            unpacker = Unpacker()
            for at, piece in enumerate(pieces):
                if at == number:
                    memory.set_nomemory(allocation, allocation + 1)
                try:
                    unpacker.feed(piece, found)
                except MemoryError:  # it has taken nothing
                    memory.remove_mem_hooks()
                    unpacker.feed(piece, found)
                finally:
                    memory.remove_mem_hooks()
            whole_ones = [(bytes(first), [*map(bytes, buffers)]) for first, buffers in found]
            lost = [pair for pair in zip(whole_ones, sent, strict=True) if pair[0] != pair[1]]
            assert len(lost) < 2
            for (left, _), (first, _) in lost:
                assert head_of_remnant(left) == first[:32].ljust(32, b"\0")


@pytest.mark.parametrize("cut", [None, 10], ids=["whole", "cut"])
def test_frames_are_writable_and_have_their_own_memory(cut: int) -> None:
    source, unpacker = bytearray(packed(b"first", [b"one", b"two"])), Unpacker()
    found = fed(unpacker, source[:cut]) + fed(unpacker, source[cut:] if cut else b"")
    ((first, (one, two)),) = found
    source[:] = bytes(len(source))
    one[:] = b"1234567"  # longer than the memory was
    assert fed(unpacker, packed(b"next")) == [(b"next", ())]
    assert (type(first), first, one, two) == (bytes, b"first", b"1234567", b"two")


def test_the_header_counts_bytes_of_any_buffer() -> None:
    numbers = memoryview(struct.pack("4I", 1, 2, 3, 4)).cast("I", (2, 2))
    ((_, (frame,)),) = fed(Unpacker(), packed(b"", [numbers]))
    assert struct.unpack("4I", frame) == (1, 2, 3, 4)


def test_a_message_that_is_too_large_is_refused_at_once() -> None:
    for data in (
        struct.pack("<II", MAX_MESSAGE_BYTES + 1, 0),
        struct.pack("<II", MAX_MESSAGE_BYTES, 1),
        struct.pack("<II", 0, MAX_MESSAGE_BYTES),
        struct.pack("<IIII", 0, 2, MAX_MESSAGE_BYTES, 1),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 8,
    ):
        for step in (len(data), 1):
            unpacker = Unpacker()
            pieces = [data[at : at + step] for at in range(0, len(data), step)]
            with pytest.raises(ProtocolError, match=f"at most {MAX_MESSAGE_BYTES} bytes"):
                [fed(unpacker, piece) for piece in pieces]
