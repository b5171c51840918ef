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
from zrpc.transport.chunks import (
    CHUNK,
    LARGEST_FRAME,
    Assembler,
    NoMemory,
    broken_off,
    chunks,
    is_chunk,
)
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


class Receiver(Assembler):
    """One that keeps what it says of messages that are lost."""

    def __init__(self):
        self.lost = []
        super().__init__(lambda sender, head: self.lost.append((sender, head.rstrip(b"\0"))))


def chunk(index, number, *sizes):
    """The first frame of one."""
    return struct.pack(f"<BxxxIQ32x{len(sizes)}Q", 0, index, number, *sizes)


messages = st.lists(st.binary(max_size=5 * SMALL), min_size=1, max_size=5)


@anything
@given(messages)
@pytest.mark.usefixtures("small_chunks")
def test_messages_are_put_together(frames):
    assembler = Receiver()
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
    assembler, whole = Receiver(), {}
    left = {"w0": sent(1, one), "w1": sent(1, other)}
    while any(left.values()):
        sender = random.choice([name for name, rest in left.items() if rest])
        header, *parts = left[sender].pop(0)
        message = assembler.add(sender, header, parts)
        if message is not None:
            whole[sender] = as_bytes(message)
    assert whole == {"w0": one, "w1": other}


def add_all(assembler, sender, parts):
    """Adds chunks; returns what comes of each."""
    return [assembler.add(sender, header, frames) for header, *frames in parts]


@pytest.mark.parametrize(
    "missing", [[0], [1], [1, 2], [0, 1, 3], [4]], ids=lambda indices: "".join(map(str, indices))
)
@pytest.mark.usefixtures("small_chunks")
def test_of_a_message_that_is_not_complete_it_is_told_once(missing):
    """By its next chunk, or the next message, which arrives; also where its number is the same."""
    assembler = Receiver()
    parts = sent(1, [b"head", b"x" * 4 * SMALL])
    come = [part for index, part in enumerate(parts) if index not in missing]
    assert add_all(assembler, "w0", come) == [None] * len(come)
    told = len(assembler.lost)
    assert told == (missing != [4])
    assert assembler.busy is not told
    *_, message = add_all(assembler, "w0", sent(2, [b"next", b"y" * 2 * SMALL]))
    assert as_bytes(message) == [b"next", b"y" * 2 * SMALL]
    assert assembler.lost == [("w0", b"head")]
    assert not assembler.busy


@anything
@given(st.permutations(range(5)), st.permutations(range(5)), st.randoms())
@pytest.mark.usefixtures("small_chunks")
def test_in_any_order_each_message_arrives_or_is_told_of_once(one, other, random):
    """Of two connections of one sender, an old one and the next, it is read in turn."""
    assembler = Receiver()
    messages = {b"one": one, b"other": other}
    left = {
        head: [sent(number, [head, bytes(5 * SMALL - len(head))])[i] for i in order]
        for number, (head, order) in enumerate(messages.items())
    }
    arrived = []
    while any(left.values()):
        head = random.choice([head for head, rest in left.items() if rest])
        message = add_all(assembler, "w0", [left[head].pop(0)])[0]
        if message is not None:
            arrived.append(as_bytes(message)[0])
    assembler.break_off("w0")
    assert sorted(arrived + [head for _, head in assembler.lost]) == [b"one", b"other"]


@pytest.mark.usefixtures("small_chunks")
def test_a_sender_can_break_off():
    assembler = Receiver()
    first, second, *_ = sent(1, [b"head", b"x" * 3 * SMALL])
    add_all(assembler, "w0", [first, second, [broken_off(1, b"head and more")]])
    add_all(assembler, "w0", [[broken_off(2, b"only this" * 9)]])
    assert assembler.lost == [("w0", b"head"), ("w0", (b"only this" * 9)[:32])]
    assert not assembler.busy


@pytest.mark.usefixtures("small_chunks")
def test_what_is_unfinished_can_be_given_up():
    assembler = Receiver()
    first, second, *_ = sent(1, [b"head", b"x" * 3 * SMALL])
    assembler.break_off("w0")
    assert assembler.lost == []
    add_all(assembler, "w0", [first])
    assembler.break_off("w0")
    assert assembler.lost == [("w0", b"head")]
    assert add_all(assembler, "w0", [second]) == [None]
    assert assembler.lost == [("w0", b"head")]


@pytest.mark.usefixtures("small_chunks")
def test_what_is_unfinished_of_a_worker_that_is_gone_is_dropped():
    assembler = Receiver()
    add_all(assembler, "w0", sent(1, [b"x" * 2 * SMALL])[:1])
    assembler.forget("w0")
    assembler.forget("w0")
    assert not assembler.busy
    assert assembler.lost == []


@pytest.mark.parametrize(
    ("header", "frames", "reason"),
    [
        (b"\0", [], "header of a chunk"),
        (chunk(0, 1)[:-1], [], "header of a chunk"),
        (chunk(0, 1), [], "sizes of frames"),
        (chunk(0, 1) + b"\1", [], "sizes of frames"),
        (chunk(0, 1, 3), [b"1234"], "more bytes"),
        (chunk(0, 1, 0), [b"1"], "more bytes"),
        (chunk(0, 1, 2**63), [b"1"], "no memory"),
        (chunk(0, 1, 2**60), [b"1"], "no memory"),
    ],
)
def test_what_no_worker_sends_is_refused(header, frames, reason):
    with pytest.raises(ProtocolError, match=reason):
        Receiver().add("w0", header, frames)


@anything
@given(st.lists(st.tuples(st.binary(max_size=70), st.lists(st.binary(max_size=9), max_size=3))))
def test_any_bytes_are_a_chunk_or_refused(stream):
    assembler = Receiver()
    for header, frames in stream:
        with contextlib.suppress(ProtocolError):
            assembler.add("w0", b"\0\0\0\0" + header, frames)


def no_memory(size):
    raise NoMemory(size, MemoryError())


@pytest.mark.parametrize("frames", [[b"head", b"x" * 30], [b"head" * 8]], ids=["later", "first"])
@pytest.mark.usefixtures("small_chunks")
def test_a_message_that_there_is_no_memory_for_is_lost_once(monkeypatch, frames):
    assembler = Receiver()
    first, *rest = sent(1, frames)
    with monkeypatch.context() as patched:
        patched.setattr(chunks_module, "_huge", no_memory)
        with pytest.raises(NoMemory) as caught:
            add_all(assembler, "w0", [first])
        assert caught.value.head[:4] == b"head"
        assert not assembler.busy
    assert add_all(assembler, "w0", rest) == [None] * len(rest)
    *_, message = add_all(assembler, "w0", sent(2, frames))
    assert as_bytes(message) == frames
    assert assembler.lost == []  # whoever caught the error knows


@pytest.mark.usefixtures("small_chunks")
def test_a_message_of_which_a_chunk_is_lost_is_ignored():
    assembler = Receiver()
    first, lost, *rest = sent(1, [b"head", b"x" * 30])
    add_all(assembler, "w0", [first])
    assert assembler.lose("w0", lost[0]).rstrip(b"\0") == b"head"
    assert not assembler.busy
    assert assembler.lose("w0", rest[0][0]) is None
    assert assembler.lose("w1", lost[0]).rstrip(b"\0") == b"head"
    assert add_all(assembler, "w0", rest) == [None] * len(rest)
    with pytest.raises(ProtocolError, match="header of a chunk"):
        assembler.lose("w0", b"\0")
    assert assembler.lost == []


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
    assembler = Receiver()
    for header, *parts in sent(1, [b"head", b"x" * size]):
        message = assembler.add("w0", header, parts)
    memoryview(message[1][0])[0] = 7
    assert message[1][0][0] == 7


@pytest.mark.usefixtures("small_chunks")
def test_parts_are_copied_as_they_come():
    assembler = Receiver()
    *begin, (header, last) = sent(1, [b"x" * (HUGE - 1)])
    for start, *parts in begin:
        parts = [bytearray(part) for part in parts]
        assembler.add("w0", start, parts)
        for part in parts:
            part[:] = bytes(len(part))  # nothing refers to them any more
    assert as_bytes(assembler.add("w0", header, [last])) == [b"x" * (HUGE - 1)]


@pytest.mark.usefixtures("small_chunks")
def test_it_is_known_that_a_message_is_on_its_way():
    assembler = Receiver()
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
    assembler, sizes = Receiver(), []
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
    current_agent()._network.send(1, chunk(5, 9), [b"x" * BULK], counted=False)
    data = os.urandom(2 * CHUNK)
    return zrpc.rpc_sync(1, echo, (data,)) == data


@pytest.mark.filterwarnings("ignore:.*security")
def test_half_a_message_is_dropped_and_loses_no_other(make_mesh, caplog):
    mesh = make_mesh(workers=2, options={"transport": "tcp", "security": "none"})
    assert mesh.run(0, echo_after_half_a_message)
    assert "broke in the midst of a large message" in caplog.text
