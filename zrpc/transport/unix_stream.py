"""Direct connections: small messages between workers of one host, from thread to thread.

ZeroMQ sends and receives in a thread of its own at either end, so a message wakes three threads one
after the other. On a direct connection, the sending thread writes to the Unix socket that the
receiving thread reads: it wakes one thread, or none if that one spins. Measured, with both ends
spinning: 6 us for a round trip instead of 75.

As with mailboxes and inboxes, a connection is for one direction, and the sender opens it on first
use. Large messages are not sent this way, so no small one has to wait behind them.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from zrpc.errors import ProtocolError
from zrpc.runtime.interrupts import uninterrupted
from zrpc.runtime.resource_limits import out_of_descriptors
from zrpc.transport.address import DIRECT
from zrpc.transport.chunks import head_of_remnant
from zrpc.transport.fd_reserve import reserve
from zrpc.transport.framing import Unpacked, Unpacker, header, pack_header
from zrpc.transport.gil_held_socket import SEND_FLAGS, GilHeldSocket, ReceiveBuffer, failure
from zrpc.transport.mailbox import size_of
from zrpc.transport.poller import Poller

logger = logging.getLogger(__name__)

# The maximum of one read; by default, a socket holds less.
_READ_BYTES = 1 << 18
# The maximum of the system for one call (IOV_MAX).
_MAX_PARTS = 1024
# A whole mesh may connect at once.
BACKLOG = 4096

# The sender's identity, the first frame and the others.
Received = tuple[bytes, bytes, Sequence[Any]]


def direct_path(endpoint: str) -> Path:
    """Returns the path of a worker's direct connections, next to the Unix socket of its inbox."""
    return Path(endpoint.removeprefix("ipc://")).with_name(DIRECT)


class DirectMailbox:
    """A Unix socket that only sends, to one peer: a `Mailbox` for small messages.

    Any thread sends, and never blocks for the peer. Messages that find no room are queued, and the
    receiving thread sends them when there is room. The bytes are copied when they are sent.

    Args:
        identity: the sender's identity.
        endpoint: the peer's inbox.
        poller: reports when there is room.
        on_broken: called in the receiving thread if the connection breaks while messages are
            queued. `abandon` returns these.

    Raises:
        zmq.ZMQError: there is no descriptor or memory left.
        OSError: the peer does not listen.

    Attributes:
        way: as of a `Mailbox`.
        sent: the number of counted messages that were sent.
        sent_bytes: the size of all messages that were sent, in bytes.
    """

    way = "direct"

    def __init__(
        self,
        identity: bytes,
        endpoint: str,
        poller: Poller,
        on_broken: Callable[[DirectMailbox], None],
    ) -> None:
        self.endpoint = endpoint
        self._poller = poller
        self._on_broken = on_broken
        # Guards everything below.
        self._mutex = threading.Lock()
        # The queued messages, and the number of bytes that were written of the first. While there
        # are any, the poller watches the socket, unless the connection is broken.
        self._queue: deque[bytes] = deque()
        self._written = 0
        self._watched = False
        self.sent = self.sent_bytes = 0
        try:
            self._socket = GilHeldSocket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error
        try:
            self._socket.socket.connect(str(direct_path(endpoint)))
            self.transmit(identity, counted=False)
        except BaseException:
            self._socket.close()
            raise

    def transmit(self, first: bytes, buffers: Sequence[Any] = (), counted: bool = True) -> None:
        """Sends one message; see `Mailbox.transmit`.

        Raises:
            ConnectionError: the peer no longer reads from this connection, or it was abandoned.
        """
        with self._mutex:
            if buffers or self._queue:
                self._transmit_parts([header(first, buffers) + first, *buffers])
            else:
                data = pack_header(len(first), 0) + first
                written = self._socket.send(data, len(data), SEND_FLAGS)
                if written < 0:
                    written = self._nothing_written(failure())
                if written < len(data):
                    self._queue_rest([data], written)
            self.sent += counted
            self.sent_bytes += size_of(first, buffers) if buffers else len(first)

    def _transmit_parts(self, parts: list[Any]) -> None:
        """Writes a message, or queues it behind others. The mutex is held."""
        if self._queue:
            if not self._watched:
                raise ConnectionError("the connection is broken")
            self._queue.append(b"".join(parts))
            return
        if len(parts) > _MAX_PARTS:
            parts = [b"".join(parts)]
        try:
            written = self._socket.socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        except OSError as error:
            written = self._nothing_written(error)
        if written < sum(memoryview(part).nbytes for part in parts):
            self._queue_rest(parts, written)

    def _nothing_written(self, error: OSError) -> int:
        """Returns 0 if there was no room.

        Raises:
            ConnectionError: the connection is broken.
            zmq.ZMQError: there is no memory left.
        """
        if isinstance(error, BlockingIOError):
            return 0
        if isinstance(error, ConnectionError):
            raise error
        if self._socket.fileno() < 0:  # another thread has abandoned it
            raise ConnectionError("the connection is closed") from error
        # For Unix sockets, ENOBUFS means that the system has no memory.
        number = errno.ENOMEM if error.errno == errno.ENOBUFS else error.errno
        raise zmq.ZMQError(number) from error

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._poller.forget(self._socket.fileno())

    def _queue_rest(self, parts: Sequence[Any], written: int) -> None:
        """Queues a message that was not wholly written. The mutex is held."""
        try:
            data = b"".join(parts)
            self._poller.watch_writable(self._socket.fileno(), self._flush)
        except (MemoryError, OSError) as error:
            # A part of the message may have been written; nothing else may follow it.
            self._close()
            raise ConnectionError("the rest of a message can't be queued") from error
        self._queue.append(data)
        self._written = written
        self._watched = True

    def _flush(self) -> None:
        """Sends queued messages when there is room. Called in the receiving thread."""
        with self._mutex:
            broken = not self._write_queue()
        if broken:
            self._on_broken(self)

    def _write_queue(self) -> bool:
        """Writes queued messages; returns False if the connection is broken. The mutex is held."""
        try:
            while self._queue:
                data = self._queue[0]
                rest = data[self._written :]
                written = self._socket.send(rest, len(rest), SEND_FLAGS)
                self._written += written if written >= 0 else self._nothing_written(failure())
                if self._written < len(data):
                    return True
                self._queue.popleft()
                self._written = 0
        except ConnectionError:
            self._unwatch()
            return False
        except zmq.ZMQError:
            return True  # no memory: the next poll tries again
        self._unwatch()
        return True

    @property
    def broken(self) -> bool:
        """Whether messages are queued that this connection can no longer send."""
        return bool(self._queue) and not self._watched

    def abandon(self) -> list[Unpacked]:
        """Closes the socket at once.

        Returns:
            The unsent messages, which must be sent another way; `sent` has counted them.
        """
        with uninterrupted, self._mutex:
            unsent = list(self._queue)
            self._close()
        messages: list[Unpacked] = []
        for data in unsent:
            Unpacker().feed(memoryview(data), messages)
        return messages

    def close(self, linger: float) -> None:
        """Closes the socket, and drops queued messages: see `drain`."""
        with uninterrupted, self._mutex:
            self._close()

    def _close(self) -> None:
        self._queue.clear()
        self._written = 0
        self._unwatch()
        self._socket.close()


def drain(mailboxes: Iterable[DirectMailbox], linger: float) -> None:
    """Sends queued messages for at most ``linger`` seconds, when no other thread polls."""
    deadline = time.monotonic() + linger
    room = select.poll()
    waiting = {each._socket.fileno(): each for each in mailboxes if each._watched}
    for fd in waiting:
        room.register(fd, select.POLLOUT)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for fd, _ in room.poll(left * 1000):
            with uninterrupted, waiting[fd]._mutex:
                waiting[fd]._write_queue()
            if not waiting[fd]._watched:
                room.unregister(fd)
                del waiting[fd]


class DirectInbox:
    """Accepts direct connections, and reads their messages in the receiving thread.

    Args:
        path: where to listen.
        poller: reports when there is anything to read.
        deliver: called with each message.
    """

    def __init__(self, path: Path, poller: Poller, deliver: Callable[[Received], None]) -> None:
        self._poller = poller
        self._deliver = deliver
        self._memory = ReceiveBuffer(_READ_BYTES)
        self._connections: set[_Connection] = set()
        self._unwatched: list[_Connection] = []  # to be watched at the next `listen`
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(BACKLOG)
        self._listening = False
        self.listen()

    def listen(self) -> None:
        """Accepts connections; may be called again after a lack of descriptors or watches."""
        try:
            while self._unwatched:
                self._watch(self._unwatched[-1])
                self._unwatched.pop()
            if not self._listening:
                self._poller.watch_readable(self._listener.fileno(), self._accept)
                self._listening = True
        except (OSError, MemoryError, RecursionError) as error:
            logger.error("direct connections have to wait: %r", error)

    def _watch(self, connection: _Connection) -> None:
        self._poller.watch_readable(connection.socket.fileno(), partial(self._read, connection))

    def _accept(self) -> None:
        try:
            accepted = self._listener.accept()[0]
        except BlockingIOError:
            return
        except OSError as error:
            if not (out_of_descriptors(error) and reserve.release()):
                # The connection stays in the backlog; see `Network.look_after_descriptors`.
                self._poller.forget(self._listener.fileno())
                self._listening = False
            return
        connection = _Connection(accepted, self._memory)
        self._connections.add(connection)
        try:
            self._watch(connection)
        except (OSError, MemoryError, RecursionError):
            # Its messages wait in the socket. Closing it would lose those that have arrived.
            self._unwatched.append(connection)

    def _read(self, connection: _Connection) -> None:
        messages: list[Unpacked] = []
        try:
            size = connection.socket.receive()
            if size < 0:
                raise failure()
        except (BlockingIOError, MemoryError):
            return  # the next poll tries again
        except OSError:
            size = 0
        data = self._memory.view[:size]
        try:
            try:
                connection.unpacker.feed(data, messages)
            except (MemoryError, RecursionError):  # for its frame: it has taken nothing
                connection.unpacker.feed(data, messages)
        except (ProtocolError, MemoryError, RecursionError) as error:
            # The bytes that follow can't be parsed. The sender will use ZeroMQ instead. Loss
            # detection fails the calls whose messages are lost.
            logger.error("a direct connection is closed: %r", error)
            size = 0
        try:
            for first, buffers in messages:
                if connection.identity:
                    self._deliver((connection.identity, first, buffers))
                elif head_of_remnant(first) is None:
                    connection.identity = first
                else:  # nobody knows whose the messages would be
                    size = 0
                    break
        except (MemoryError, RecursionError):  # as if they could not be parsed
            size = 0
        if not size:
            self._poller.forget(connection.socket.fileno())
            self._connections.discard(connection)
            connection.socket.close()

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()


class _Connection:
    """A connection that a peer has opened.

    Attributes:
        identity: the sender's identity; empty until it has arrived.
    """

    __slots__ = ("identity", "socket", "unpacker")

    def __init__(self, accepted: socket.socket, memory: ReceiveBuffer) -> None:
        self.socket = GilHeldSocket(accepted, memory)
        self.unpacker = Unpacker()
        self.identity = b""
