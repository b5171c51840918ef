"""Messages in a stream of bytes, however that is cut."""

from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.errors import ProtocolError
from zrpc.transport import stream
from zrpc.transport.stream import LARGEST_MESSAGE, Unpacker, header

MESSAGES = st.lists(st.tuples(st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=4)))


def packed(first, buffers=()):
    return b"".join((header(first, buffers), first, *buffers))


def fed(unpacker, data):
    return list(unpacker.feed(memoryview(data)))


@given(MESSAGES, st.data())
def test_messages_come_out_wherever_the_stream_is_cut(messages, data):
    whole = b"".join(packed(*message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    unpacker, found = Unpacker(), []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += fed(unpacker, whole[start:stop])
    assert [(first, list(buffers)) for first, buffers in found] == messages


@given(MESSAGES)
def test_messages_come_out_of_single_bytes(messages):
    unpacker, found = Unpacker(), []
    for message in messages:
        data = packed(*message)
        for at in range(len(data) - 1):
            assert fed(unpacker, data[at : at + 1]) == []
        found += fed(unpacker, data[-1:])
    assert [(first, list(buffers)) for first, buffers in found] == messages


def test_a_large_message_in_small_pieces_takes_no_time():
    data, unpacker, found = packed(b"first", [bytes(LARGEST_MESSAGE - 100)]), Unpacker(), []
    begun = time.process_time()
    for at in range(0, len(data), 4):  # were what is there copied each time: 128 GiB
        found += fed(unpacker, data[at : at + 4])
    assert time.process_time() - begun < 2
    assert [(first, len(buffers[0])) for first, buffers in found] == [
        (b"first", LARGEST_MESSAGE - 100)
    ]


class Full(bytearray):
    """Memory that can't grow."""

    def __iadd__(self, _):
        raise MemoryError


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=3), MESSAGES, st.data())
def test_a_message_that_finds_no_memory_is_skipped(buffers, messages, data):
    """The next ones come out; and of this, what tells whose it is."""
    first = b"head" * 30
    whole = packed(first, buffers)
    cut = data.draw(st.integers(len(header(first, buffers)) + 1, len(whole) - 1))
    more = data.draw(st.integers(cut, len(whole)))
    unpacker, found = Unpacker(), []
    if data.draw(st.booleans()):  # at its beginning, or later
        unpacker._rest = Full()
        found += fed(unpacker, packed(b"before") + whole[:cut])
        assert found.pop(0) == (b"before", ())
        unpacker._rest = bytearray()
    else:
        assert fed(unpacker, whole[:cut]) == []
        unpacker._rest = Full(unpacker._rest)
    found += fed(unpacker, whole[cut:more])
    if more == cut and not found:
        found += fed(unpacker, b"")
    rest = whole[more:] + b"".join(packed(*message) for message in messages)
    found += fed(unpacker, rest)
    (head, nothing), *others = found
    assert nothing is None
    assert first.startswith(head)
    assert [(one, list(more)) for one, more in others] == messages


def test_where_it_can_not_be_told_where_a_message_ends_the_stream_does():
    whole = packed(b"first", [b"x"] * 2000)
    for size in (4, 7000):
        unpacker = Unpacker()
        unpacker._rest = Full()
        with pytest.raises(MemoryError):
            fed(unpacker, whole[:size])
    unpacker = Unpacker()
    unpacker._rest = Full(whole[:6000])  # not yet all of the sizes
    with pytest.raises(MemoryError):
        fed(unpacker, whole[6000:])


@pytest.mark.parametrize("cut", [None, 10], ids=["whole", "cut"])
def test_frames_are_writable_and_memory_of_their_own(cut):
    source, unpacker = bytearray(packed(b"first", [b"one", b"two"])), Unpacker()
    found = fed(unpacker, source[:cut]) + fed(unpacker, source[cut:] if cut else b"")
    ((first, (one, two)),) = found
    source[:] = bytes(len(source))
    one[:] = b"1234567"  # longer than it was
    assert fed(unpacker, packed(b"next")) == [(b"next", ())]
    assert (type(first), first, one, two) == (bytes, b"first", b"1234567", b"two")


def test_any_buffer_is_measured_in_bytes():
    numbers = memoryview(struct.pack("4I", 1, 2, 3, 4)).cast("I", (2, 2))
    ((_, (frame,)),) = fed(Unpacker(), packed(b"", [numbers]))
    assert struct.unpack("4I", frame) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", LARGEST_MESSAGE + 1, 0),
        struct.pack("<II", LARGEST_MESSAGE, 1),
        struct.pack("<II", 0, LARGEST_MESSAGE),
        struct.pack("<IIII", 0, 2, LARGEST_MESSAGE, 1),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 8,
    ],
)
def test_what_is_too_large_is_refused_at_once(data):
    for step in (len(data), 1):
        unpacker = Unpacker()
        pieces = (data[at : at + step] for at in range(0, len(data), step))
        with pytest.raises(ProtocolError, match=f"at most {LARGEST_MESSAGE} bytes"):
            [fed(unpacker, piece) for piece in pieces]


def test_messages_before_garbage_come_out():
    messages = Unpacker().feed(memoryview(packed(b"message") + b"\xff" * 8))
    assert next(messages) == (b"message", ())
    with pytest.raises(ProtocolError):
        next(messages)


@given(st.lists(st.binary(max_size=60)))
def test_any_bytes_are_messages_or_refused(pieces):
    unpacker = Unpacker()
    try:
        found = [message for piece in pieces for message in fed(unpacker, piece)]
    except ProtocolError:
        return
    # No byte is read twice.
    size = sum(len(packed(first, buffers)) for first, buffers in found)
    assert size <= sum(map(len, pieces))


def _without_memory(_):
    raise MemoryError


def test_frames_without_memory_are_none(monkeypatch):
    unpacker = Unpacker()
    monkeypatch.setattr(stream, "bytearray", _without_memory, raising=False)
    found = fed(unpacker, packed(b"first", [b"a"]) + packed(b"second"))
    assert found == [(b"first", None), (b"second", ())]
    monkeypatch.setattr(stream, "bytes", _without_memory, raising=False)
    found = fed(unpacker, packed(b"third", [b"a"]) + packed(b"fourth"))
    assert found == [(None, None), (None, None)]
    monkeypatch.undo()
    assert fed(unpacker, packed(b"fifth")) == [(b"fifth", ())]
