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

__all__ = ["GilHeldSocket", "ReceiveBuffer"]

_libc = ctypes.PyDLL(None, use_errno=True)
_send, _recv = _libc.send, _libc.recv
_send.restype = _recv.restype = ctypes.c_ssize_t
# Made once, since making one takes as long as the call itself.
_RECEIVE_FLAGS = ctypes.c_int(socket.MSG_DONTWAIT)
_SEND_FLAGS = ctypes.c_int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _failure() -> OSError:
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
        self._size = ctypes.c_size_t(size)
        self._address = ctypes.c_void_p(
            ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
        )

    def receive(self, source: GilHeldSocket) -> int:
        """Receives available bytes; returns their number, which is 0 at the end of the stream.

        Raises:
            OSError: as ``socket.recv`` does.
        """
        size: int = _recv(source.fd, self._address, self._size, _RECEIVE_FLAGS)
        if size < 0:
            raise _failure()
        return size


class GilHeldSocket:
    """A non-blocking stream socket, for one thread at a time.

    Args:
        inner: the socket, which this object owns from now on.
    """

    def __init__(self, inner: socket.socket) -> None:
        inner.setblocking(False)
        self.socket = inner
        self.fd = ctypes.c_int(inner.fileno())

    def fileno(self) -> int:
        """Returns the descriptor; -1 if the socket is closed."""
        return self.fd.value

    def send(self, data: bytes) -> int:
        """Sends what there is room for; returns the number of bytes.

        Raises:
            OSError: as ``socket.send`` does.
        """
        size: int = _send(self.fd, data, ctypes.c_size_t(len(data)), _SEND_FLAGS)
        if size < 0:
            raise _failure()
        return size

    def close(self) -> None:
        """Closes the socket."""
        self.fd.value = -1  # the system may reuse the number
        self.socket.close()
