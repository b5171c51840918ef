"""Small messages between workers of one host, from thread to thread.

ZeroMQ sends and receives in a thread of its own at either end, so that a message wakes three
threads in turn. Here the thread that sends writes to the Unix socket from which the one that
receives reads: it wakes one thread, or none where that looks for messages already. Measured, with
both ends looking: 6 us there and back in place of 75.

As with mailboxes and inboxes, a connection is for one direction, opened by the sender on first use.
Large messages don't go this way: no small one has to wait behind them.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from zrpc.errors import ProtocolError
from zrpc.exhaustion import out_of_descriptors
from zrpc.transport.address import DIRECT
from zrpc.transport.poller import Poller
from zrpc.transport.reserve import reserve
from zrpc.transport.stream import Unpacker, header

__all__ = ["DirectInbox", "DirectMailbox", "direct_path"]

logger = logging.getLogger(__name__)

# The most that is read at once, in bytes: a socket holds less by default.
_READ = 1 << 18
# More the system does not take in one call (IOV_MAX).
_MOST_PARTS = 1024
# As for ZeroMQ's: a whole mesh may connect at once.
_BACKLOG = 4096


def direct_path(endpoint: str) -> Path:
    """Where a worker listens for direct connections, next to the Unix socket of its inbox."""
    return Path(endpoint.removeprefix("ipc://")).with_name(DIRECT)


class DirectMailbox:
    """A Unix socket that only sends, to one peer; the like of `Mailbox` for small messages.

    Any thread sends, and never blocks for the peer: what finds no room is queued, and sent by the
    thread that receives, once there is. The bytes are copied when they are sent.

    Args:
        identity: the sender's token.
        endpoint: the peer's inbox.
        poller: tells when there is room.

    Raises:
        zmq.ZMQError: there is no descriptor or memory left.
        OSError: the peer does not listen.

    Attributes:
        sent: how many messages that count were sent.
    """

    def __init__(self, identity: bytes, endpoint: str, poller: Poller) -> None:
        self.endpoint = endpoint
        self._poller = poller
        # Guards the socket, the queue and `sent`.
        self._mutex = threading.Lock()
        # What is still to be sent; while there is anything, the poller watches the socket.
        self._queue: deque[memoryview] = deque()
        self.sent = 0
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error
        try:
            self._socket.setblocking(False)
            self._socket.connect(str(direct_path(endpoint)))
            self.send(identity, counted=False)
        except BaseException:
            self._socket.close()
            raise

    def send(self, first: bytes, buffers: Sequence[Any] = (), counted: bool = True) -> None:
        """Sends one message; see `Mailbox.send`.

        Raises:
            ConnectionError: the peer reads no more from this connection.
        """
        data: Any = header(first, buffers) + first
        parts: list[Any] = [data, *buffers]
        if len(parts) > _MOST_PARTS:
            parts = [b"".join(parts)]
        with self._mutex:
            if self._queue:
                self._queue.append(memoryview(b"".join(parts)))
            else:
                written = self._write(parts)
                if written < len(data) or buffers:
                    self._keep_rest(parts, written)
            self.sent += counted

    def _write(self, parts: Sequence[Any]) -> int:
        """Writes what there is room for; returns how many bytes. The mutex is held."""
        try:
            if len(parts) == 1:
                return self._socket.send(parts[0], socket.MSG_NOSIGNAL)
            return self._socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except ConnectionError:
            raise
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error

    def _keep_rest(self, parts: Sequence[Any], written: int) -> None:
        """Queues what was not written of a message, if anything. The mutex is held."""
        if written < sum(memoryview(part).nbytes for part in parts):
            self._queue.append(memoryview(b"".join(parts))[written:])
            self._poller.watch_writable(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        """Sends what is queued and finds room. In the thread that receives, or at the end."""
        with self._mutex:
            try:
                while self._queue:
                    written = self._write([self._queue[0]])
                    if written < len(self._queue[0]):
                        self._queue[0] = self._queue[0][written:]
                        return
                    self._queue.popleft()
            except ConnectionError:
                self._queue.clear()
            except zmq.ZMQError:
                return  # no memory; to be tried again
            self._poller.forget(self._socket.fileno())

    def close(self, linger: float) -> None:
        """Closes the socket; what is queued has ``linger`` seconds to leave."""
        deadline = time.monotonic() + linger
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while self._queue and (left := deadline - time.monotonic()) > 0:
            room.poll(left * 1000)
            self._flush()
        with self._mutex:
            if self._queue:
                self._queue.clear()
                self._poller.forget(self._socket.fileno())
            self._socket.close()


class DirectInbox:
    """Listens for direct connections, and reads what comes.

    Args:
        path: where to listen.
        poller: tells when there is something to read; in the thread that receives.
        deliver: takes a message: the sender's identity, the first frame and the others, as
            `Unpacker.feed` gives them.
    """

    def __init__(
        self,
        path: Path,
        poller: Poller,
        deliver: Callable[[tuple[bytes, bytes, Sequence[Any] | None]], None],
    ) -> None:
        self._poller = poller
        self._deliver = deliver
        self._memory = memoryview(bytearray(_READ))
        self._connections: set[_Connection] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)
        self._listening = False
        self.listen()

    def listen(self) -> None:
        """Accepts connections; again, after there were no descriptors left for one."""
        if not self._listening:
            self._listening = True
            self._poller.watch_readable(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            accepted = self._listener.accept()[0]
        except BlockingIOError:
            return
        except OSError as error:
            if not (out_of_descriptors(error) and reserve.release()):
                # It waits at the socket; see `Network.look_after_descriptors`.
                self._poller.forget(self._listener.fileno())
                self._listening = False
            return
        accepted.setblocking(False)
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._poller.watch_readable(accepted.fileno(), partial(self._read, connection))

    def _read(self, connection: _Connection) -> None:
        try:
            size = connection.socket.recv_into(self._memory)
            messages = connection.unpacker.feed(self._memory[:size])
        except BlockingIOError:
            return
        except ConnectionError:
            size = 0
        except (ProtocolError, MemoryError) as error:
            # What follows can't be told apart; the sender will go another way.
            logger.error("a direct connection is closed: %r", error)
            size = 0
        if not size:
            self._poller.forget(connection.socket.fileno())
            self._connections.discard(connection)
            connection.socket.close()
            return
        for first, buffers in messages:
            if connection.identity:
                self._deliver((connection.identity, first, buffers))
            else:
                connection.identity = first

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()


class _Connection:
    """One that a peer has opened.

    Attributes:
        identity: whose it is; empty until it has said so.
    """

    __slots__ = ("identity", "socket", "unpacker")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.unpacker = Unpacker()
        self.identity = b""
