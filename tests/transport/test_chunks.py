"""Large messages in chunks: they are reassembled, and no frame is above the limit."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transport.numbered import connect, opened
from zrpc.errors import ProtocolError
from zrpc.transport import chunks as chunks_module
from zrpc.transport.chunks import (
    BEGINS_CHUNK,
    CHUNK_BYTES,
    Assembler,
    abort_chunk,
    chunks,
)
from zrpc.transport.network import Network

SMALL = 8
HUGE = 3 * SMALL


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "CHUNK_BYTES", SMALL)
    monkeypatch.setattr(chunks_module, "_HUGE_PAGES_FROM_BYTES", HUGE)


# The fixture above may be shared by all examples.
anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def sent(number: int, frames: list[bytes]) -> list[list[bytes]]:
    """Returns the chunks of a message as they arrive."""
    return [[bytes(frame) for frame in chunk] for chunk in chunks(number, frames)]


def as_bytes(message: tuple[Any, list[Any]] | None) -> list[bytes]:
    first, buffers = message
    return [bytes(first[:]), *(bytes(buffer[:]) for buffer in buffers)]


class Receiver(Assembler):
    """An assembler that records its reports of lost messages."""

    def __init__(self) -> None:
        self.lost = []
        super().__init__(lambda sender, head: self.lost.append((sender, head.rstrip(b"\0"))))


def chunk(index: int, number: int, *sizes: int) -> bytes:
    """Returns the first frame of a chunk."""
    return struct.pack(f"<BxxxIQ32x{len(sizes)}Q", 0, index, number, *sizes)


messages = st.lists(st.binary(max_size=5 * SMALL), min_size=1, max_size=5)


@pytest.mark.system
@anything
@given(messages, messages, st.randoms())
@pytest.mark.usefixtures("small_chunks")
def test_messages_of_two_senders_are_reassembled_and_do_not_mix(
    one: list[bytes], other: list[bytes], random: Any
) -> None:
    assembler, whole = Receiver(), {}
    left = {"w0": sent(1, one), "w1": sent(1, other)}
    while any(left.values()):
        sender = random.choice([name for name, rest in left.items() if rest])
        header, *parts = left[sender].pop(0)
        assert header[:1] == BEGINS_CHUNK
        assert sum(map(len, parts)) <= SMALL
        message = assembler.add(sender, header, parts)
        if message is not None:
            whole[sender] = as_bytes(message)
    assert whole == {"w0": one, "w1": other}


def add_all(assembler: Assembler, sender: str, parts: list[Any]) -> list[Any]:
    """Adds chunks; returns the results."""
    return [assembler.add(sender, header, frames) for header, *frames in parts]


@pytest.mark.usefixtures("small_chunks")
def test_an_incomplete_message_is_reported_once() -> None:
    """When its next chunk or the next message arrives."""
    for missing in ([0], [1], [1, 2], [0, 1, 3], [4]):
        assembler = Receiver()
        parts = sent(1, [b"head", b"x" * 4 * SMALL])
        come = [part for index, part in enumerate(parts) if index not in missing]
        assert add_all(assembler, "w0", come) == [None] * len(come)
        told = len(assembler.lost)
        assert told == (missing != [4])
        assert bool(assembler.unfinished) is not told
        *_, message = add_all(assembler, "w0", sent(2, [b"next", b"y" * 2 * SMALL]))
        assert as_bytes(message) == [b"next", b"y" * 2 * SMALL]
        assert assembler.lost == [("w0", b"head")]
        assert not assembler.unfinished


@pytest.mark.usefixtures("small_chunks")
def test_a_sender_can_abort_a_message() -> None:
    assembler = Receiver()
    first, second, *_ = sent(1, [b"head", b"x" * 3 * SMALL])
    add_all(assembler, "w0", [first, second, [abort_chunk(1, b"head and more")]])
    add_all(assembler, "w0", [[abort_chunk(2, b"only this" * 9)]])
    assert assembler.lost == [("w0", b"head"), ("w0", (b"only this" * 9)[:32])]
    assert not assembler.unfinished


@pytest.mark.usefixtures("small_chunks")
def test_an_unfinished_message_can_be_broken_off_or_forgotten() -> None:
    assembler = Receiver()
    first, second, *_ = sent(1, [b"head", b"x" * 3 * SMALL])
    assembler.break_off("w0")
    add_all(assembler, "w0", [first])
    for _ in range(2):
        assembler.forget("w0")
        assert not assembler.unfinished
    assert assembler.lost == []
    add_all(assembler, "w0", [first])
    assembler.break_off("w0")
    assert assembler.lost == [("w0", b"head")]
    assert add_all(assembler, "w0", [second]) == [None]
    assert assembler.lost == [("w0", b"head")]
    assembler.forget("w0")  # also which of its messages were lost
    *_, message = add_all(assembler, "w0", sent(1, [b"head", b"whole"]))
    assert as_bytes(message) == [b"head", b"whole"]


def test_malformed_chunks_are_refused() -> None:
    for header, frames, reason in (
        (b"\0", [], "header of a chunk"),
        (chunk(0, 1)[:-1], [], "header of a chunk"),
        (chunk(0, 1), [], "sizes of frames"),
        (chunk(0, 1) + b"\1", [], "sizes of frames"),
        (chunk(0, 1, 3), [b"1234"], "more bytes"),
        (chunk(0, 1, 0), [b"1"], "more bytes"),
        (chunk(0, 1, 2**63), [b"1"], "no memory"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            Receiver().add("w0", header, frames)


def test_a_message_without_memory_is_lost_once() -> None:
    assembler = Receiver()
    with pytest.raises(ProtocolError, match="no memory for a frame"):
        assembler.add("w0", chunk(0, 1, 2**60), [b"x"])
    assert not assembler.unfinished
    assert assembler.lost == [("w0", b"")]  # though no other chunk may follow
    assert add_all(assembler, "w0", [[chunk(1, 1), b"x"], [chunk(2, 1), b"x"]]) == [None, None]
    assert assembler.lost == [("w0", b"")]
    *_, message = add_all(assembler, "w0", sent(2, [b"head"]))
    assert as_bytes(message) == [b"head"]


@pytest.mark.usefixtures("small_chunks")
def test_cutting_copies_nothing() -> None:
    large = bytearray(1000 * SMALL)
    parts = list(chunks(1, [large]))
    large[0] = 255
    assert parts[0][1][0] == 255
    assert len(parts) == 1000


@pytest.mark.parametrize("size", [HUGE - 1, HUGE], ids=["frames", "huge"])
@pytest.mark.usefixtures("small_chunks")
def test_parts_are_copied_as_they_arrive_into_frames_that_are_writable(size: int) -> None:
    assembler = Receiver()
    *begin, (header, last) = sent(1, [b"head", b"x" * size])
    for start, *parts in begin:
        *_, part = parts = [bytearray(part) for part in parts]
        assembler.add("w0", start, parts)
        part[:] = bytes(len(part))  # nothing refers to it any longer
    message = assembler.add("w0", header, [last])
    assert as_bytes(message) == [b"head", b"x" * size]
    memoryview(message[1][0])[0] = 7
    assert message[1][0][0] == 7


# -- through sockets -----------------------------------------------------------------------


def received(network: Network) -> tuple[list[bytes], list[int]]:
    """Returns the next message, reassembled, and the sizes of its frames on the wire."""
    assembler, sizes = Receiver(), []
    while True:
        identity, first, buffers = network.receive(5)
        sizes += map(len, buffers)
        if first[:1] != BEGINS_CHUNK:
            return [first, *map(bytes, buffers)], sizes
        whole = assembler.add(identity, first, buffers)
        if whole is not None:
            return [bytes(frame) for frame in (whole[0], *whole[1])], sizes


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kind", ["tcp", "ipc", "inproc"])
def test_messages_of_all_sizes_arrive(kind: str) -> None:
    with opened(ipc=kind == "ipc") as networks:
        connect(networks, "127.0.0.1" if kind == "tcp" else "")
        to = 0 if kind == "inproc" else 1
        around_one = (CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1)
        for size in (1, *around_one, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 7):
            frame = b"\1" + os.urandom(size - 1)
            networks[0].send(to, frame)
            message, _ = received(networks[to])
            assert message == [frame]
            networks[0].send(to, b"head", [frame, b"", b"between", frame])
            message, sizes = received(networks[to])
            assert message == [b"head", frame, b"", b"between", frame]
            assert max(sizes) <= CHUNK_BYTES or kind != "tcp"
