"""Bytes from outside: nothing of them is unpickled before it is known who sent them."""

from __future__ import annotations

import contextlib
import pickle
import socket
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


def test_garbage_from_a_member_is_logged(caller: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """`tests/fuzz` sends much more of it."""
    other_kind = Message(1).first_frame()[:1] + b"\xfa" + bytes(30)
    for frame in (b"", b"\xff" * 200, other_kind, call_with(1)[:32] + b"not a pickle"):
        caller.agent(0).network.send(1, frame, counted=False)
        assert rpc.rpc_sync(1, echo, (1,)) == 1
        assert caller.run(1, rpc.rpc_sync, 0, echo, (1,)) == 1
    for text in ("expected a header of 32 bytes, found 0", "found version 255", "found 250"):
        assert text in caplog.text
