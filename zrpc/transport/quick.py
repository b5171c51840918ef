"""Sending and receiving without giving up the interpreter's lock. For Linux.

The methods of Python's sockets give the lock up for each call, so that other threads may run
meanwhile. Of several that have something to do, another one gets it then, and keeps it until it
waits for something: up to 5 ms (``sys.getswitchinterval``) where it computes. That is too much for
what takes a microsecond and never waits. `ctypes.PyDLL` calls functions with the lock held.
"""

from __future__ import annotations

import ctypes
import os
import socket

from zrpc.transport.poller import supports_polling

__all__ = ["Memory", "QuickSocket"]

if supports_polling():  # as elsewhere there are no direct connections
    _libc = ctypes.PyDLL(None, use_errno=True)
    _send, _recv = _libc.send, _libc.recv
    _send.restype = _recv.restype = ctypes.c_ssize_t
    # Made once, since that takes as long as the call itself.
    _RECEIVE_FLAGS = ctypes.c_int(socket.MSG_DONTWAIT)
    _SEND_FLAGS = ctypes.c_int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _failure() -> OSError:
    # Not by trying again with Python's own call: the system tells of a reset only once.
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))  # of the class that fits


class Memory:
    """Where to receive.

    Args:
        size: how much, in bytes.

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

    def receive(self, quick: QuickSocket) -> int:
        """Receives what is there; returns how many bytes, 0 at the end of the stream.

        Raises:
            OSError: as ``socket.recv`` does.
        """
        size: int = _recv(quick.fd, self._address, self._size, _RECEIVE_FLAGS)
        if size < 0:
            raise _failure()
        return size


class QuickSocket:
    """A stream socket that does not block, for one thread at a time.

    Args:
        of: the socket, which belongs to this one from now on.
    """

    def __init__(self, of: socket.socket) -> None:
        of.setblocking(False)
        self.socket = of
        self.fd = ctypes.c_int(of.fileno())

    def fileno(self) -> int:
        """The descriptor; -1 where it is closed."""
        return self.fd.value

    def send(self, data: bytes) -> int:
        """Sends what there is room for; returns how many bytes.

        Raises:
            OSError: as ``socket.send`` does.
        """
        size: int = _send(self.fd, data, ctypes.c_size_t(len(data)), _SEND_FLAGS)
        if size < 0:
            raise _failure()
        return size

    def close(self) -> None:
        """Closes the socket."""
        self.fd.value = -1  # the number may be another one's soon
        self.socket.close()
