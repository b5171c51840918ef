"""Sends and receives without releasing the interpreter's lock (GIL).

The methods of Python's sockets release the lock for each call, so other threads may run. If another
thread is ready, it gets the lock, and keeps it until it waits for something: up to 5 ms
(``sys.getswitchinterval``) if it computes. That is too long for a call that takes a microsecond and
never waits. `ctypes.PyDLL` calls functions with the lock held.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from functools import partial

SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

_libc = ctypes.PyDLL(None, use_errno=True)
_send, _recv = _libc.send, _libc.recv
_send.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
_send.restype = _recv.restype = ctypes.c_ssize_t
# Made once, since making one takes as long as the call itself.
_RECEIVE_FLAGS = ctypes.c_int(socket.MSG_DONTWAIT)


def failure() -> OSError:
    """Returns the error of this thread's last call that has returned a negative number."""
    # Not by repeating the call with Python's socket: the system reports a reset only once.
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))  # makes the subclass for this number


class ReceiveBuffer:
    """Memory to receive into.

    Args:
        size: in bytes.

    Attributes:
        view: the memory.
    """

    def __init__(self, size: int) -> None:
        memory = bytearray(size)
        self.view = memoryview(memory)
        self.size = ctypes.c_size_t(size)
        self.address = ctypes.c_void_p(ctypes.addressof((ctypes.c_char * size).from_buffer(memory)))


class GilHeldSocket:
    """A non-blocking stream socket, for one thread at a time.

    Args:
        inner: the socket, which this object owns from now on.
        memory: where it receives.

    Attributes:
        send: ``send(data, size, SEND_FLAGS)`` sends what there is room for. It returns the number
            of bytes; if that is negative, `failure` returns the error.
        receive: ``receive()`` receives available bytes into the memory. It returns their number, 0
            at the end of the stream; if that is negative, as `send`.
    """

    def __init__(self, inner: socket.socket, memory: ReceiveBuffer | None = None) -> None:
        inner.setblocking(False)
        self.socket = inner
        self._fd = ctypes.c_int(inner.fileno())
        # Without a function of Python's between, as each message passes here.
        self.send: Callable[[bytes, int, int], int] = partial(_send, self._fd)
        if memory is not None:
            place = memory.address, memory.size, _RECEIVE_FLAGS
            self.receive: Callable[[], int] = partial(_recv, self._fd, *place)

    def fileno(self) -> int:
        """Returns the descriptor; -1 if the socket is closed."""
        return self._fd.value

    def close(self) -> None:
        """Closes the socket."""
        self._fd.value = -1  # the system may reuse the number
        self.socket.close()
