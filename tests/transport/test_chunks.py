"""Large messages in chunks: they are put together again, and no frame is above the limit."""

from __future__ import annotations

import array
import contextlib
import os
import struct

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zrpc
from zrpc.current import current_agent
from zrpc.errors import ProtocolError
from zrpc.transport import chunks as chunks_module
from zrpc.transport.chunks import CHUNK, LARGEST_FRAME, Assembler, NoMemory, chunks, is_chunk
from zrpc.transport.network import BULK, Network
from zrpc.wire.header import Message

SMALL = 8
HUGE = 3 * SMALL


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks_module, "CHUNK", SMALL)
    monkeypatch.setattr(chunks_module, "_HUGE_FROM", HUGE)


# The fixture above is the same for all examples.
anything = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def sent(number, frames):
    """The chunks of a message as they arrive."""
    return [[bytes(frame) for frame in chunk] for chunk in chunks(number, frames)]


def as_bytes(message):
    first, buffers = message
    return [bytes(first[:]), *(bytes(buffer[:]) for buffer in buffers)]


messages = st.lists(st.binary(max_size=5 * SMALL), min_size=1, max_size=5)


@anything
@given(messages)
@pytest.mark.usefixtures("small_chunks")
def test_messages_are_put_together(frames):
    assembler = Assembler()
    *begin, last = sent(7, frames)
    for header, *parts in begin:
        assert is_chunk(header)
        assert assembler.add("w0", header, parts) is None
        assert 0 < sum(map(len, parts)) <= SMALL
    header, *parts = last
    assert as_bytes(assembler.add("w0", header, parts)) == frames


@anything
@given(messages, messages, st.randoms())
@pytest.mark.usefixtures("small_chunks")
def test_senders_do_not_mix(one, other, random):
    assembler, whole = Assembler(), {}
    left = {"w0": sent(1, one), "w1": sent(1, other)}
    while any(left.values()):
        sender = random.choice([name for name, rest in left.items() if rest])
        header, *parts = left[sender].pop(0)
        message = assembler.add(sender, header, parts)
        if message is not None:
            whole[sender] = as_bytes(message)
    assert whole == {"w0": one, "w1": other}


@pytest.mark.usefixtures("small_chunks")
def test_after_a_gap_the_rest_is_dropped_and_the_next_message_arrives():
    assembler = Assembler()
    first, _, *rest = sent(1, [b"x" * 5 * SMALL])
    assert assembler.add("w0", first[0], first[1:]) is None
    for header, *parts in rest:
        with pytest.raises(ProtocolError, match="expected chunk"):
            assembler.add("w0", header, parts)
    for header, *parts in sent(2, [b"y" * 2 * SMALL]):
        message = assembler.add("w0", header, parts)
    assert as_bytes(message) == [b"y" * 2 * SMALL]


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_of_another_message_does_not_go_on_with_this_one():
    assembler = Assembler()
    (header, *parts), *_ = sent(1, [b"x" * 2 * SMALL])
    assembler.add("w0", header, parts)
    _, (header, *parts) = sent(2, [b"y" * 2 * SMALL])
    with pytest.raises(ProtocolError, match=r"\(1, 1\), found \(2, 1\)"):
        assembler.add("w0", header, parts)


@pytest.mark.usefixtures("small_chunks")
def test_what_is_unfinished_of_a_worker_that_is_gone_is_dropped():
    assembler = Assembler()
    begin, end = sent(1, [b"x" * 2 * SMALL])
    assembler.add("w0", begin[0], begin[1:])
    assembler.forget("w0")
    assembler.forget("w0")
    with pytest.raises(ProtocolError, match="the first of a message"):
        assembler.add("w0", end[0], end[1:])


@pytest.mark.parametrize(
    ("header", "frames", "reason"),
    [
        (b"\0", [], "header of a chunk"),
        (struct.pack("<BxxxIQ", 0, 0, 1), [], "sizes of frames"),
        (struct.pack("<BxxxIQB", 0, 0, 1, 1), [], "sizes of frames"),
        (struct.pack("<BxxxIQQ", 0, 0, 1, 3), [b"1234"], "more bytes"),
        (struct.pack("<BxxxIQQ", 0, 0, 1, 0), [b"1"], "more bytes"),
        (struct.pack("<BxxxIQQ", 0, 0, 1, 2**63), [b"1"], "no memory"),
        (struct.pack("<BxxxIQQ", 0, 0, 1, 2**60), [b"1"], "no memory"),
        (struct.pack("<BxxxIQQ", 0, 1, 1, 3), [b"123"], "the first of a message"),
    ],
)
def test_what_no_worker_sends_is_refused(header, frames, reason):
    with pytest.raises(ProtocolError, match=reason):
        Assembler().add("w0", header, frames)


@anything
@given(st.lists(st.tuples(st.binary(max_size=40), st.lists(st.binary(max_size=9), max_size=3))))
def test_any_bytes_are_a_chunk_or_refused(stream):
    assembler = Assembler()
    for header, frames in stream:
        with contextlib.suppress(ProtocolError):
            assembler.add("w0", b"\0\0\0\0" + header, frames)


def no_memory(size):
    raise NoMemory(size, MemoryError())


@pytest.mark.parametrize("frames", [[b"head", b"x" * 30], [b"head" * 8]], ids=["later", "first"])
@pytest.mark.usefixtures("small_chunks")
def test_a_message_that_there_is_no_memory_for_is_lost_once(monkeypatch, frames):
    assembler = Assembler()
    with monkeypatch.context() as patched:
        patched.setattr(chunks_module, "_huge", no_memory)
        (header, *parts), *rest = sent(1, frames)
        with pytest.raises(NoMemory) as caught:
            assembler.add("w0", header, parts)
        assert caught.value.first[:4] == b"head"
        assert not assembler.busy
    for header, *parts in rest:
        assert assembler.ignores("w0", header)
        assert assembler.add("w0", header, parts) is None
    # A number may come again: that of a message of which the sender could not send all.
    for header, *parts in sent(1, frames):
        message = assembler.add("w0", header, parts)
    assert as_bytes(message) == frames


@pytest.mark.usefixtures("small_chunks")
def test_a_message_of_which_a_chunk_is_lost_is_ignored():
    assembler = Assembler()
    (header, *parts), (lost, *_), *rest = sent(1, [b"head", b"x" * 30])
    assembler.add("w0", header, parts)
    assert not assembler.ignores("w0", lost)
    assert assembler.lose("w0", lost) == b"head"
    assert not assembler.busy
    assert assembler.lose("w1", lost) is None
    for header, *parts in rest:
        assert assembler.add("w0", header, parts) is None
    assembler.forget("w0")
    with pytest.raises(ProtocolError, match="the first of a message"):
        assembler.add("w0", header, parts)


def test_no_message_looks_like_a_chunk():
    assert not is_chunk(Message(1).first_frame())
    assert not is_chunk(b"")


def test_sizes_are_in_bytes():
    numbers = array.array("d", range(3))
    [[_, only]] = chunks(1, [numbers])
    assert bytes(only) == numbers.tobytes()


@pytest.mark.usefixtures("small_chunks")
def test_cutting_copies_nothing():
    large = bytearray(1000 * SMALL)
    parts = list(chunks(1, [large]))
    large[0] = 255
    assert parts[0][1][0] == 255
    assert len(parts) == 1000


@pytest.mark.parametrize("size", [HUGE - 1, HUGE], ids=["frames", "huge"])
@pytest.mark.usefixtures("small_chunks")
def test_what_arrives_can_be_written_to(size):
    assembler = Assembler()
    for header, *parts in sent(1, [b"head", b"x" * size]):
        message = assembler.add("w0", header, parts)
    memoryview(message[1][0])[0] = 7
    assert message[1][0][0] == 7


@pytest.mark.usefixtures("small_chunks")
def test_parts_are_copied_as_they_come():
    assembler = Assembler()
    *begin, (header, last) = sent(1, [b"x" * (HUGE - 1)])
    for start, *parts in begin:
        parts = [bytearray(part) for part in parts]
        assembler.add("w0", start, parts)
        for part in parts:
            part[:] = bytes(len(part))  # nothing refers to them any more
    assert as_bytes(assembler.add("w0", header, [last])) == [b"x" * (HUGE - 1)]


@pytest.mark.usefixtures("small_chunks")
def test_it_is_known_that_a_message_is_on_its_way():
    assembler = Assembler()
    assert not assembler.busy
    for sender in ("w0", "w1"):
        header, *parts = sent(1, [b"x" * HUGE])[0]
        assembler.add(sender, header, parts)
    for header, *parts in sent(1, [b"x" * HUGE])[1:]:
        assembler.add("w0", header, parts)
    assert assembler.busy
    assembler.forget("w1")
    assert not assembler.busy


# -- through sockets -----------------------------------------------------------------------


def received(network):
    """The next message, put together, and the sizes of the frames that it came in."""
    assembler, sizes = Assembler(), []
    while True:
        identity, first, buffers = network.receive(5)
        sizes += map(len, buffers)
        if not is_chunk(first):
            return [first, *map(bytes, buffers)], sizes
        whole = assembler.add(identity, first, buffers)
        if whole is not None:
            return [bytes(frame) for frame in (whole[0], *whole[1])], sizes


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kind", ["tcp", "ipc", "inproc"])
def test_messages_of_all_sizes_arrive(kind):
    networks = [Network(b"z%d" % rank, rank, 2, kind == "ipc") for rank in range(2)]
    try:
        if kind == "tcp":
            endpoints = [network.listen_tcp("127.0.0.1", None) for network in networks]
        else:
            endpoints = [f"ipc://{n.directory.socket_path}" for n in networks]
        networks[0].connect(endpoints)
        to = 0 if kind == "inproc" else 1
        for size in [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7]:
            frame = b"\1" + os.urandom(size - 1)
            networks[0].send(to, frame)
            message, _ = received(networks[to])
            assert message == [frame]
            networks[0].send(to, b"head", [frame, b"", b"between", frame])
            message, sizes = received(networks[to])
            assert message == [b"head", frame, b"", b"between", frame]
            assert max(sizes) <= CHUNK or kind != "tcp"
    finally:
        for network in networks:
            network.close(0, ())


def test_a_chunk_is_within_the_limit_also_encrypted():
    # 33 bytes: the name of the command, a nonce, a signature and flags.
    assert CHUNK + 33 < LARGEST_FRAME < 2**20


@pytest.mark.usefixtures("no_leaks")
def test_what_is_above_the_limit_is_refused_on_tcp_only():
    network = Network(b"z0", 0, 1, True)
    try:
        endpoints = [network.listen_tcp("127.0.0.1", None)]
        endpoints.append(f"ipc://{network.directory.socket_path}")
        with zmq.Context() as context:
            for endpoint, arrives in zip(endpoints, [False, True], strict=True):
                with context.socket(zmq.DEALER) as raw:
                    raw.linger = 0
                    raw.connect(endpoint)
                    raw.send_multipart([b"head", bytes(LARGEST_FRAME + 1)])
                    assert (network.receive(0.3 if not arrives else 5) is not None) is arrives
    finally:
        network.close(0, ())


def echo(value):
    return value


def echo_after_half_a_message():
    """A chunk that goes on with nothing, and a large call through the same mailbox."""
    header = struct.pack("<BxxxIQ", 0, 5, 9)
    current_agent()._network.send(1, header, [b"x" * BULK], counted=False)
    data = os.urandom(2 * CHUNK)
    return zrpc.rpc_sync(1, echo, (data,)) == data


@pytest.mark.filterwarnings("ignore:.*security")
def test_half_a_message_is_dropped_and_loses_no_other(make_mesh, caplog):
    mesh = make_mesh(workers=2, options={"transport": "tcp", "security": "none"})
    assert mesh.run(0, echo_after_half_a_message)
    assert "a connection broke" in caplog.text
