"""Bytes from outside: nothing of them is unpickled before it is known who sent them."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

import zrpc as rpc
from tests.support.targets import echo
from zrpc.testing import Mesh
from zrpc.transport.framing import header
from zrpc.transport.unix_stream import direct_path
from zrpc.wire.message import Message

_ran = threading.Event()


def _explode() -> None:
    _ran.set()


class Charge:
    """Runs `_explode` where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def inbox_of(mesh: Mesh, rank: int) -> str:
    return f"ipc://{Path(mesh.agent(rank).membership.records[rank].directory) / 'inbox'}"


def call_with(payload: Any) -> bytes:
    return Message(1, 1, 0.0, pickle.dumps((echo, (payload,), {}))).first_frame()


@pytest.mark.system
def test_what_a_stranger_sends_is_not_unpickled(caller: Mesh) -> None:
    _ran.clear()
    for identity in (b"stranger", b"waker", b"z" + bytes(16)):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 2000
            stranger.routing_id = identity
            stranger.connect(inbox_of(caller, 1))
            stranger.send(call_with(Charge()))
            stranger.send_multipart([b"", b"", b""])
            stranger.send(b"\0" * 100)
            # Nothing answers a stranger; the next calls' answers show that it was read.
            assert not stranger.poll(100)
            for i in range(20):
                assert rpc.rpc_sync(1, echo, (i,)) == i
    with socket.socket(socket.AF_UNIX) as direct:
        direct.connect(str(direct_path(inbox_of(caller, 1))))
        for first in (b"stranger", b"", b"x" * 10, call_with(Charge())):
            direct.sendall(header(first) + first)
        direct.sendall(b"\xff" * 8)
        with contextlib.suppress(ConnectionResetError):
            assert direct.recv(1) == b""  # all is read
    assert rpc.rpc_sync(1, echo, (1,)) == 1
    assert not _ran.is_set()
    pickle.loads(pickle.dumps(Charge()))
    assert _ran.is_set()  # else the test would show nothing


# A number that no call of the test has.
NOBODYS = 2**40
_HEADER = struct.Struct("<BBHIIfQQ")
VERSION = Message(1).first_frame()[0]


FRAMES = [
    b"",
    b"\xff" * 200,
    _HEADER.pack(99, 1, 0, 0, 0, 0.0, NOBODYS, 0),
    _HEADER.pack(VERSION, 250, 0, 0, 0, 0.0, NOBODYS, 0),
    _HEADER.pack(VERSION, 1, 0, 2**31, 0, 0.0, NOBODYS, 0),
    _HEADER.pack(VERSION, 1, 0, 0, 0, float("nan"), NOBODYS, 0),
    _HEADER.pack(VERSION, 1, 0, 3, 0, 0.0, NOBODYS, 0) + b"\1\0\0",
    _HEADER.pack(VERSION, 2, 0, 0, 0, 0.0, 2**63, 0),
    _HEADER.pack(VERSION, 8, 0, 0, 0, 0.0, 0, 0) + b"not a termination message",
    _HEADER.pack(VERSION, 16, 0, 0, 0, 0.0, NOBODYS, 0),
    _HEADER.pack(VERSION, 19, 0, 0, 0, 0.0, 0, 0) + b"?",
    _HEADER.pack(VERSION, 1, 0, 0, 0, 0.0, NOBODYS, 0) + b"not a pickle",
]


def test_garbage_from_a_member_is_logged_and_ends_nothing(
    caller: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    for frame in FRAMES:
        caller.agent(0).network.send(1, frame, counted=False)
        for i in range(5):
            assert rpc.rpc_sync(1, echo, (i,)) == i
        assert caller.run(1, rpc.rpc_sync, 0, echo, (1,)) == 1
    for text in ("expected a header of 32 bytes, found 0", "found version 255", "found 250"):
        assert text in caplog.text


def test_the_socket_is_private(mesh: Mesh) -> None:
    directory = Path(mesh.agent(0).membership.records[0].directory)
    assert directory.stat().st_mode & 0o777 == 0o700
