"""Frames in pieces: what is cut is put together again, and no piece is above the limit."""

from __future__ import annotations

import array
import os

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.transport import pieces
from zrpc.transport.network import Network
from zrpc.transport.pieces import LARGEST_FRAME, PIECE, cut, joined, marked

SMALL = 8


@pytest.fixture(scope="module", autouse=True)
def _small_pieces():
    """For the tests without sockets; those with some bring their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", SMALL)
        yield


def put_together(frames):
    """As `Inbox.receive` does it."""
    left, whole = list(frames), []

    def receive():
        return left.pop(0)

    while left:
        frame = receive()
        if len(frame) == SMALL:
            frame = joined(frame, lambda: bool(left), receive)
        whole.append(bytes(frame))
    return whole


@settings(deadline=None)
@given(st.lists(st.binary(max_size=5 * SMALL), max_size=5))
def test_what_is_cut_is_put_together(frames):
    assert put_together(bytes(piece) for piece in cut(frames)) == frames
    assert all(len(piece) <= SMALL for piece in cut(frames))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=5 * SMALL), max_size=5))
def test_what_is_marked_is_put_together(frames):
    assert put_together(marked(frames)) == frames


@settings(deadline=None)
@given(st.lists(st.binary(max_size=2 * SMALL), max_size=6))
def test_any_frames_make_some_message(frames):
    assert b"".join(put_together(frames)) == b"".join(frames)


def test_sizes_are_in_bytes():
    numbers = array.array("d", range(3))
    assert b"".join(bytes(piece) for piece in cut([numbers])) == numbers.tobytes()
    assert len(cut([numbers])) == 4  # 24 bytes are 3 pieces, and the mark of their end
    assert len(marked([array.array("d", [1.0])])) == 2


def test_a_piece_alone_is_not_copied():
    frame = bytearray(SMALL)
    assert joined(frame, lambda: False, lambda: pytest.fail("nothing is left")) is frame
    assert joined(frame, lambda: True, lambda: b"") is frame


# -- through sockets -----------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kind", ["tcp", "ipc", "inproc"])
def test_messages_of_all_sizes_arrive(monkeypatch, kind):
    monkeypatch.setattr(pieces, "PIECE", PIECE)
    networks = [Network(b"z%d" % rank, rank, 2, kind == "ipc") for rank in range(2)]
    try:
        if kind == "tcp":
            endpoints = [network.listen_tcp("127.0.0.1", None) for network in networks]
        else:
            endpoints = [f"ipc://{n.directory.socket_path}" for n in networks]
        networks[0].connect(endpoints)
        to = 0 if kind == "inproc" else 1
        sizes = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7]
        frames = [os.urandom(size) for size in sizes]
        for frame in frames:
            networks[0].send(to, frame)
            assert tuple(networks[to].receive(5))[1:] == (frame, [])
            networks[0].send(to, b"head", [frame, b"between", frame])
            _, first, buffers = networks[to].receive(5)
            assert first == b"head"
            assert [bytes(buffer) for buffer in buffers] == [frame, b"between", frame]
    finally:
        for network in networks:
            network.close(0, ())


def test_the_largest_piece_is_within_the_limit_also_encrypted():
    # 33 bytes: the name of the command, a nonce, a signature and flags.
    assert PIECE + 33 < LARGEST_FRAME < 2**20


@pytest.mark.usefixtures("no_leaks")
def test_what_is_above_the_limit_is_refused_on_tcp_only(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", PIECE)
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


def test_cutting_copies_nothing():
    large = bytearray(1000 * SMALL)
    parts = cut([large])
    large[0] = 255
    assert parts[0][0] == 255
    assert len(parts) == 1001
