"""A worker in a process of its own continues to serve whatever bytes it is sent."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

import zrpc
from tests.fuzz.mutation import INPUTS, corpus, inputs, mutated
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.testing import Mesh
from zrpc.transport.chunks import MAX_FRAME_BYTES
from zrpc.transport.framing import header
from zrpc.transport.unix_stream import direct_path
from zrpc.wire.kind import Kind

SEEDS = corpus()
BATCH = 500
# Messages after which a member has left, or has begun to leave.
LAST_WORDS = (Kind.LEAVE, Kind.TERMINATION)
# Call ids that no test uses.
NOBODYS = 2**40
# All that is sent here is refused, with a line of log each time.
PROCESSES = {"workers": 2, "processes": True, "timeout": max(60, INPUTS // 100), "leaks": False}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\x05HELLO\x01\x00" + bytes(192)


def _silence() -> None:
    logging.disable(logging.CRITICAL)


def _inbox() -> str:
    directory = current_agent().network.directory
    assert directory is not None
    return f"ipc://{directory.socket_path}"


def _tcp_endpoint() -> str:
    return current_agent().network.tcp_endpoint


def _resident() -> int:
    """Returns the memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def serves(mesh: Mesh) -> None:
    """Checks that calls between the two workers are answered, in both directions."""
    assert mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2)) == 2
    assert mesh.run(1, zrpc.rpc_sync, 0, max, args=(1, 2)) == 2


@pytest.fixture
def attacked(mesh: Mesh) -> Iterator[Mesh]:
    """Yields a mesh that must serve after the test as before."""
    mesh.run_all(_silence)
    serves(mesh)
    yield mesh
    serves(mesh)
    # A graceful shutdown needs the counts of messages, which no longer agree.
    mesh.shutdown(graceful=False)


def batches() -> Iterator[int]:
    """Returns a seed for each batch."""
    source = random.Random(7)
    for _ in range(max(1, INPUTS // BATCH)):
        yield source.getrandbits(64)


# -- from a member -------------------------------------------------------------------------


def harmless(data: bytes) -> bytes:
    """Returns the message without parts that a member may use legitimately.

    A pickle of a member is run, which is not the subject here. A zero byte begins no pickle.
    """
    head = bytearray(data)
    if len(head) > 1 and head[1] in LAST_WORDS:
        head[1] = 250
    if len(head) >= 24:
        head[16:24] = (int.from_bytes(head[16:24], "little") | NOBODYS).to_bytes(8, "little")
    if len(head) >= 32:
        extensions, table = struct.unpack_from("<II", head, 4)
        for start in (32 + extensions, 32 + extensions + table):
            if start < len(head):
                head[start] = 0
    return bytes(head)


def _send(seed: int, count: int, seeds: list[bytes]) -> None:
    network, source = current_agent().network, random.Random(seed)
    for data in inputs(seed, count, seeds):
        buffers = [source.randbytes(source.randint(0, 64)) for _ in range(source.randint(0, 3))]
        network.send(1, harmless(data), buffers if source.random() < 0.3 else (), counted=False)


@pytest.mark.zrpc(**PROCESSES)
def test_mutated_messages_of_a_member(attacked: Mesh) -> None:
    for seed in batches():
        attacked.run(0, _send, seed, BATCH, SEEDS)
        serves(attacked)


# -- from strangers ------------------------------------------------------------------------


@pytest.mark.zrpc(**PROCESSES)
def test_mutated_messages_of_a_stranger_on_the_same_socket(attacked: Mesh) -> None:
    # The stranger is the same user, since no other has access to the socket.
    endpoint, source = attacked.run(1, _inbox), random.Random(1)
    for seed in batches():
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 2000
            stranger.routing_id = b"z" + source.randbytes(source.randint(1, 20))
            stranger.connect(endpoint)
            for data in inputs(seed, BATCH, SEEDS):
                stranger.send_multipart([data] * source.randint(1, 3))
        serves(attacked)


# -- at the socket of direct connections ---------------------------------------------------


def framed(first: bytes, buffers: Sequence[bytes] = ()) -> bytes:
    return b"".join((header(first, buffers), first, *buffers))


def say_directly(path: str, data: bytes) -> None:
    """Sends bytes on a connection of its own, which may be closed in the meantime."""
    with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as made:
        made.settimeout(10)
        made.connect(path)
        made.sendall(data)


@pytest.mark.zrpc(**PROCESSES)
def test_bytes_at_the_direct_socket(attacked: Mesh) -> None:
    path, source = str(direct_path(attacked.run(1, _inbox))), random.Random(3)
    seeds = [framed(b"z" * 17)]
    seeds += [framed(data, [b"buffer"] * (len(data) % 3)) for data in SEEDS]
    for number in range(INPUTS // 10):
        changed = [mutated(source, seeds) for _ in range(source.randint(1, 5))]
        say_directly(path, b"".join(changed))
        if number % 100 == 99:
            serves(attacked)


# -- by tcp --------------------------------------------------------------------------------


def connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(port)), 10)
    made.settimeout(0.001)
    return made


def say(endpoint: str, data: bytes) -> None:
    """Sends bytes on a connection of its own, and reads for a millisecond at most."""
    with contextlib.suppress(OSError), connect(endpoint) as stranger:
        stranger.sendall(data)
        stranger.recv(4096)


@pytest.mark.zrpc(**PROCESSES, options={"transport": "tcp"})
def test_bytes_of_strangers_on_tcp(attacked: Mesh) -> None:
    endpoint, source = attacked.run(1, _tcp_endpoint), random.Random(2)
    command = b"\x06" + struct.pack(">Q", len(HELLO)) + HELLO
    seeds = [
        GREETING,
        GREETING + command,
        GREETING + b"\x04\xc8" + HELLO,
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for number in range(INPUTS // 10):
        say(endpoint, mutated(source, seeds))
        if number % 100 == 99:
            serves(attacked)


@pytest.mark.zrpc(**PROCESSES, options={"transport": "tcp"})
def test_many_silent_connections(attacked: Mesh) -> None:
    endpoint = attacked.run(1, _tcp_endpoint)
    # Each also announces the largest frame, which costs nothing before it arrives.
    promise = GREETING + b"\x06" + struct.pack(">Q", MAX_FRAME_BYTES) + b"x"
    before = attacked.run(1, _resident)
    with contextlib.ExitStack() as stack:
        for number in range(min(10_000, _room_for_connections(), max(500, INPUTS // 10))):
            stranger = stack.enter_context(connect(endpoint))
            if number % 2:
                stranger.sendall(promise)
        serves(attacked)
        grown = attacked.run(1, _resident) - before
        assert grown < 64 * 2**20 + 20_000 * number, f"{grown} bytes for {number} connections"


@pytest.mark.zrpc(**PROCESSES, options={"transport": "tcp"})
def test_the_memory_of_strangers_is_given_back_when_they_have_left(attacked: Mesh) -> None:
    endpoint = attacked.run(1, _tcp_endpoint)
    almost = GREETING + b"\x06" + struct.pack(">Q", MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES - 1)
    before = attacked.run(1, _resident)
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(connect(endpoint)).sendall(almost)
        until(lambda: attacked.run(1, _resident) > before + 48 * 2**20, "it holds what they sent")
    until(lambda: attacked.run(1, _resident) < before + 16 * 2**20, "the memory is given back")


def _room_for_connections() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500


@pytest.mark.zrpc(**PROCESSES, options={"transport": "tcp"})
def test_strangers_that_use_up_the_descriptors(attacked: Mesh) -> None:
    endpoint = attacked.run(1, _tcp_endpoint)
    limit = attacked.run(1, _allow_descriptors, 30)
    with contextlib.ExitStack() as stack:
        for _ in range(limit):
            stack.enter_context(connect(endpoint))
        until(
            lambda: len(os.listdir(f"/proc/{attacked.pid(1)}/fd")) >= limit,
            "the connections are not accepted",
        )
        serves(attacked)
    attacked.run(1, _allow_all_descriptors)


def _allow_descriptors(more: int) -> int:
    """Limits the descriptors to ``more`` above the highest in use; returns the limit."""
    limit = max(map(int, os.listdir("/proc/self/fd"))) + more
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    return limit


def _allow_all_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
