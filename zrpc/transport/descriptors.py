"""Open file descriptors on their way to another worker of the host (``SCM_RIGHTS``).

A descriptor goes by a datagram, ahead of the message that needs it, whichever way that takes. So
the streams of messages are read without looking for descriptors, which would cost each message
0.2 us. A datagram stays at the receiver even if its sender exits. If the receiver has no room for
it, the sender learns that at once, and can send the message without it. The system tells the
receiver from which path a datagram comes, and so from which worker.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from zrpc.transport.address import DESCRIPTORS

# In place of a descriptor that could not be received.
NO_DESCRIPTOR = -1

_NOTE = struct.Struct("<QQ")  # the sender's number as a peer, and that of the descriptor
_ONE_DESCRIPTOR = socket.CMSG_LEN(struct.calcsize("i"))
# How many datagrams are read at a time. The system queues fewer, unless net.unix.max_dgram_qlen is
# larger; but a peer could send them as fast as they are read.
_MAX_AT_ONCE = 1 << 12


class DescriptorSocket:
    """A Unix datagram socket in a worker's private directory; never waits.

    Any thread may send, one at a time receives.

    Args:
        directory: the private directory.
    """

    def __init__(self, directory: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(directory / DESCRIPTORS))
        except BaseException:
            self._socket.close()
            raise

    def send(self, own: int, endpoint: str, number: int, fd: int) -> None:
        """Sends a descriptor, which stays open here.

        Args:
            own: this worker's number as a peer.
            endpoint: the receiver's inbox.
            number: what the receiver knows the descriptor by.
            fd: the descriptor.

        Raises:
            OSError: the receiver is gone or has no room, or too many descriptors of this user are
                on their way.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))
        self._socket.sendmsg([_NOTE.pack(own, number)], [rights], 0, _place(endpoint))

    def receive(self, endpoint: Callable[[int], str]) -> Iterator[tuple[int, int, int]]:
        """Yields what has come: the peer, the number, and the descriptor or `NO_DESCRIPTOR`.

        The latter means that this process has no descriptors left, or that the peer has sent none.
        The caller closes the descriptors.

        Args:
            endpoint: returns a peer's inbox; raises KeyError if there is no such peer. What does
                not come from the socket next to its sender's inbox is discarded.
        """
        for _ in range(_MAX_AT_ONCE):
            try:
                data, rights, _, place = self._socket.recvmsg(
                    _NOTE.size, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:  # there is nothing left, or the socket is closed
                return
            fds = array.array("i")
            for _, _, content in rights:
                fds.frombytes(content)
            try:
                peer, number = _NOTE.unpack(data)
                known = place == _place(endpoint(peer))
            except (struct.error, KeyError, ValueError):
                known = False
            if known:
                yield peer, number, fds.pop() if fds else NO_DESCRIPTOR
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Closes the socket; descriptors that have not been received are closed with it."""
        self._socket.close()


def _place(endpoint: str) -> str:
    """Returns the path of a worker's socket for descriptors, next to that of its inbox."""
    return str(Path(endpoint.removeprefix("ipc://")).with_name(DESCRIPTORS))
