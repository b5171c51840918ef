"""Sockets that keep the interpreter's lock while they send and receive."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.support.handled import signal_handlers
from tests.support.threads import start_all
from tests.support.waiting import SOON
from zrpc.transport.gil_held_socket import SEND_FLAGS, GilHeldSocket, ReceiveBuffer, failure

pytestmark = [pytest.mark.usefixtures("no_leaks")]

SIZE = 1 << 16


@pytest.fixture
def memory() -> ReceiveBuffer:
    return ReceiveBuffer(SIZE)


@pytest.fixture
def ends(memory: ReceiveBuffer) -> Iterator[list[GilHeldSocket]]:
    """Yields two connected sockets."""
    ends = [GilHeldSocket(each, memory) for each in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def send(end: GilHeldSocket, data: bytes) -> int:
    size = end.send(data, len(data), SEND_FLAGS)
    if size < 0:
        raise failure()
    return size


def receive(end: GilHeldSocket) -> int:
    size = end.receive()
    if size < 0:
        raise failure()
    return size


def test_sending_to_a_closed_peer_fails_without_a_signal(ends: list[GilHeldSocket]) -> None:
    here, there = ends
    there.close()
    raised: list[int] = []
    with signal_handlers() as handle:
        handle(lambda number, _: raised.append(number), signal.SIGPIPE)
        with pytest.raises(BrokenPipeError):
            send(here, b"x")
        assert raised == []
        with pytest.raises(BrokenPipeError):
            os.write(here.fileno(), b"x")
        assert raised == [signal.SIGPIPE]


def test_a_closed_socket_never_uses_its_reused_descriptor(ends: list[GilHeldSocket]) -> None:
    here = ends[0]
    number = here.fileno()
    pair = socket.socketpair()
    for _ in range(2):
        here.close()
    assert here.fileno() == -1
    os.dup2(pair[0].fileno(), number)  # the system would reuse it soon
    try:
        pair[1].send(b"not for you")
        for use in (partial(send, here, b"stray"), partial(receive, here)):
            with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
                use()
        pair[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            pair[1].recv(1)
        assert pair[0].recv(100) == b"not for you"
    finally:
        os.close(number)
        for each in pair:
            each.close()


@pytest.fixture
def nobody_has_to_give_up_the_lock() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.system
@pytest.mark.usefixtures("nobody_has_to_give_up_the_lock")
def test_the_lock_is_held_while_sending_and_receiving(
    ends: list[GilHeldSocket], memory: ReceiveBuffer
) -> None:
    here, there = ends

    ended, turns = threading.Event(), []

    def take_the_lock() -> None:
        while not ended.wait(0.0001):  # releases the lock, and takes it again
            turns.append(None)

    def exchange() -> None:
        send(here, b"a message")
        receive(there)

    def exchange_by_python() -> None:
        here.socket.send(b"a message")
        there.socket.recv_into(memory.view)

    def turns_meanwhile(exchange: Callable[[], object], seconds: float) -> int:
        """Repeats an exchange until the thread gets the lock; returns how often it did."""
        end, before = time.monotonic() + seconds, len(turns)
        while len(turns) == before and time.monotonic() < end:
            exchange()
        return len(turns) - before

    finish = start_all([take_the_lock], SOON)
    # It does get the lock when the lock is released.
    assert turns_meanwhile(exchange_by_python, SOON)
    assert not turns_meanwhile(exchange, 0.1)
    ended.set()
    assert finish() == [None]
