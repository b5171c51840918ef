"""Sending and receiving with the interpreter's lock held."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from zrpc.transport.poller import supports_polling
from zrpc.transport.quick import Memory, QuickSocket

pytestmark = [pytest.mark.usefixtures("no_leaks")]
linux_only = pytest.mark.skipif(not supports_polling(), reason="quick sockets are for Linux")

SOON = 10.0
SIZE = 1 << 16


@pytest.fixture
def memory():
    return Memory(SIZE)


@pytest.fixture
def ends():
    """Two that are connected."""
    ends = [QuickSocket(each) for each in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def received(memory, end):
    return bytes(memory.view[: memory.receive(end)])


def fill(end, data):
    """Sends data until there is no more room; returns all of it."""
    sent = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += data[: end.send(data)]
    return sent


@linux_only
@pytest.mark.parametrize("data", [b"x", b"\0", b"a\0b\0\0c\0", bytes(range(256)) * 16], ids=len)
def test_what_is_sent_is_received(ends, memory, data):
    here, there = ends
    assert here.send(data) == len(data)
    assert received(memory, there) == data
    assert there.send(data[::-1]) == len(data)
    assert received(memory, here) == data[::-1]


@linux_only
def test_what_has_no_room_in_the_memory_is_received_next(ends):
    here, there = ends
    small = Memory(4)
    here.send(b"0123456")
    assert received(small, there) == b"0123"
    assert received(small, there) == b"456"


@linux_only
def test_an_empty_socket_has_nothing(ends, memory):
    with pytest.raises(BlockingIOError):
        memory.receive(ends[0])


@linux_only
def test_a_full_socket_takes_nothing_until_there_is_room(ends, memory):
    here, there = ends
    data = os.urandom(SIZE)
    sent = fill(here, data)
    with pytest.raises(BlockingIOError):
        here.send(b"more")
    found = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            found += received(memory, there)
    assert found == sent
    assert here.send(b"again") == 5


@linux_only
def test_the_end_of_the_stream(ends, memory):
    here, there = ends
    here.send(b"last")
    here.close()
    assert received(memory, there) == b"last"
    assert memory.receive(there) == 0
    assert memory.receive(there) == 0


@linux_only
def test_a_peer_that_is_gone(ends):
    here, there = ends
    there.close()
    with pytest.raises(BrokenPipeError):
        here.send(b"x")


@linux_only
def test_a_peer_that_has_gone_with_something_unread(ends, memory):
    here, there = ends
    here.send(b"never read")
    there.close()
    with pytest.raises(ConnectionResetError):
        memory.receive(here)
    assert memory.receive(here) == 0


@linux_only
def test_a_send_to_one_that_has_gone_with_something_unread(ends):
    here, there = ends
    here.send(b"never read")
    there.close()
    for _ in range(2):  # which of the two comes first depends on the kernel
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            here.send(b"x")


BROKEN_PIPE = """
import signal, socket
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from zrpc.transport.quick import QuickSocket
here, there = socket.socketpair()
quick = QuickSocket(here)
there.close()
try:
    SEND
except BrokenPipeError:
    print("survived")
"""


@linux_only
@pytest.mark.parametrize(
    ("send", "code", "output"),
    [
        ("quick.send(b'x')", 0, "survived\n"),
        # Where the signal is not held off, it ends the process.
        ("import os; os.write(quick.fileno(), b'x')", -signal.SIGPIPE, ""),
    ],
    ids=["quick", "control"],
)
def test_no_signal_ends_the_process(send, code, output):
    program = BROKEN_PIPE.replace("SEND", send)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, output), done.stderr


@linux_only
def test_nothing_goes_to_another_socket_that_gets_the_number(ends, memory):
    here = ends[0]
    number = here.fileno()
    pair = socket.socketpair()
    here.close()
    assert here.fileno() == -1
    os.dup2(pair[0].fileno(), number)  # the system itself would give it away soon
    try:
        pair[1].send(b"not for you")
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            here.send(b"stray")
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            memory.receive(here)
        pair[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            pair[1].recv(1)
        assert pair[0].recv(100) == b"not for you"
    finally:
        os.close(number)
        for each in pair:
            each.close()


def test_it_may_be_closed_twice(ends):
    ends[0].close()
    ends[0].close()
    assert ends[0].fileno() == -1


class Waiter:
    """A thread that wants the interpreter's lock again and again, and counts how often it got it.

    It never keeps it, so that no other has to wait for it.
    """

    def __init__(self):
        self.turns = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._ended:
            self.turns += 1
            time.sleep(0.0001)  # it has given the lock up, and wants it back now

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended = True
        self._thread.join(SOON)
        assert not self._thread.is_alive()


@pytest.fixture
def nobody_has_to_give_up_the_lock():
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    yield
    sys.setswitchinterval(before)


def turns_meanwhile(waiter, exchange, seconds):
    """How often the waiter got the lock; at most until it did."""
    until = time.monotonic() + seconds
    before = waiter.turns
    while waiter.turns == before and time.monotonic() < until:
        exchange()
    return waiter.turns - before


@linux_only
@pytest.mark.usefixtures("nobody_has_to_give_up_the_lock")
def test_the_lock_is_kept(ends, memory):
    here, there = ends

    def exchange():
        here.send(b"a message")
        memory.receive(there)

    def exchange_by_python():
        here.socket.send(b"a message")
        there.socket.recv_into(memory.view)

    with Waiter() as waiter:
        # It gets the lock where that is given up at all.
        assert turns_meanwhile(waiter, exchange_by_python, SOON)
        assert not turns_meanwhile(waiter, exchange, 0.1)


@linux_only
@pytest.mark.usefixtures("nobody_has_to_give_up_the_lock")
def test_the_lock_is_kept_where_nothing_can_be_done(ends, memory):
    here, there = ends
    fill(here, bytes(SIZE))

    def attempt():
        with pytest.raises(BlockingIOError):
            here.send(b"no room")
        with pytest.raises(BlockingIOError):
            memory.receive(here)

    with Waiter() as waiter:
        assert not turns_meanwhile(waiter, attempt, 0.1)
        assert turns_meanwhile(waiter, lambda: there.socket.recv_into(memory.view[:1]), SOON)


ELSEWHERE = """
import ctypes, select, socket
del select.epoll, socket.MSG_DONTWAIT, socket.MSG_NOSIGNAL, ctypes.PyDLL
import zrpc.transport.direct, zrpc.transport.quick
print("imported")
"""


def test_other_systems_can_import_it():
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "imported\n", done.stderr
