"""Small messages between workers of one host, from thread to thread.

ZeroMQ sends and receives in a thread of its own at either end, so that a message wakes three
threads in turn. Here the thread that sends writes to the Unix socket from which the one that
receives reads: it wakes one thread, or none where that looks for messages already. Measured, with
both ends looking: 6 us there and back in place of 75.

As with mailboxes and inboxes, a connection is for one direction, opened by the sender on first use.
Large messages don't go this way: no small one has to wait behind them.
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
from zrpc.exhaustion import out_of_descriptors
from zrpc.transport.address import DIRECT
from zrpc.transport.poller import Poller
from zrpc.transport.quick import Memory, QuickSocket
from zrpc.transport.reserve import reserve
from zrpc.transport.stream import Unpacked, Unpacker, header

__all__ = ["BACKLOG", "Delivered", "DirectInbox", "DirectMailbox", "direct_path", "drain"]

logger = logging.getLogger(__name__)

# The most that is read at once, in bytes: a socket holds less by default.
_READ = 1 << 18
# More the system does not take in one call (IOV_MAX).
_MOST_PARTS = 1024
# A whole mesh may connect at once.
BACKLOG = 4096

# The sender's identity, the first frame and the others; None for what there was no memory for.
Delivered = tuple[bytes, bytes | None, Sequence[Any] | None]


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
        on_broken: told where the connection is found broken while messages are queued, which are
            to be had from `give_up`; in the thread that receives.

    Raises:
        zmq.ZMQError: there is no descriptor or memory left.
        OSError: the peer does not listen.

    Attributes:
        sent: how many messages that count were sent.
    """

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
        # Guards all that follows.
        self._mutex = threading.Lock()
        # What is still to be sent, and how much of the first has been. While there is anything,
        # the poller watches the socket, unless that is broken.
        self._queue: deque[bytes] = deque()
        self._written = 0
        self._watched = False
        self.sent = 0
        try:
            self._socket = QuickSocket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error
        try:
            self._socket.socket.connect(str(direct_path(endpoint)))
            self.send(identity, counted=False)
        except BaseException:
            self._socket.close()
            raise

    def send(self, first: bytes, buffers: Sequence[Any] = (), counted: bool = True) -> None:
        """Sends one message; see `Mailbox.send`.

        Raises:
            ConnectionError: the peer reads no more from this connection, or it was given up.
        """
        data = header(first, buffers) + first
        parts: list[Any] = [data, *buffers]
        if len(parts) > _MOST_PARTS:
            parts = [b"".join(parts)]
        with self._mutex:
            if self._queue:
                if not self._watched:
                    raise ConnectionError("the connection is broken")
                self._queue.append(b"".join(parts))
            else:
                written = self._write(parts)
                if written < len(data) or buffers:
                    self._keep_rest(parts, written)
            self.sent += counted

    def _write(self, parts: Sequence[Any]) -> int:
        """Writes what there is room for; returns how many bytes. The mutex is held."""
        try:
            if len(parts) == 1:
                return self._socket.send(parts[0])
            return self._socket.socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except ConnectionError:
            raise
        except OSError as error:
            if self._socket.fileno() < 0:  # another thread has given it up meanwhile
                raise ConnectionError("the connection is closed") from error
            # Of Unix sockets, ENOBUFS says that the system has no memory.
            number = errno.ENOMEM if error.errno == errno.ENOBUFS else error.errno
            raise zmq.ZMQError(number) from error

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._poller.forget(self._socket.fileno())

    def _keep_rest(self, parts: Sequence[Any], written: int) -> None:
        """Queues a message that was not written to its end, if it was not. The mutex is held."""
        if written == sum(memoryview(part).nbytes for part in parts):
            return
        try:
            data = b"".join(parts)
            self._poller.watch_writable(self._socket.fileno(), self._flush)
        except (MemoryError, OSError) as error:
            # A part of the message may be written; nothing else may follow it.
            self._close()
            raise ConnectionError("the rest of a message can't be kept") from error
        self._queue.append(data)
        self._written = written
        self._watched = True

    def _flush(self) -> None:
        """Sends what is queued and finds room. In the thread that receives."""
        with self._mutex:
            broken = not self._drain()
        if broken:
            self._on_broken(self)

    def _drain(self) -> bool:
        """Sends what finds room; False where the connection is broken. The mutex is held."""
        try:
            while self._queue:
                data = self._queue[0]
                self._written += self._write([data[self._written :]])
                if self._written < len(data):
                    return True
                self._queue.popleft()
                self._written = 0
        except ConnectionError:
            self._unwatch()
            return False
        except zmq.ZMQError:
            return True  # no memory; to be tried again
        self._unwatch()
        return True

    def give_up(self) -> list[Unpacked]:
        """Closes the socket at once.

        Returns:
            The messages that have not left, and have to go another way; `sent` counts them.
        """
        with self._mutex:
            unsent = list(self._queue)
            self._close()
        return [message for data in unsent for message in Unpacker().feed(memoryview(data))]

    def close(self, linger: float) -> None:
        """Closes the socket; what is queued has ``linger`` seconds to leave."""
        drain([self], linger)
        with self._mutex:
            self._close()

    def _close(self) -> None:
        self._queue.clear()
        self._written = 0
        self._unwatch()
        self._socket.close()


def drain(mailboxes: Iterable[DirectMailbox], linger: float) -> None:
    """Has what is queued leave, for at most ``linger`` seconds; for when nobody polls any more."""
    deadline = time.monotonic() + linger
    room = select.poll()
    waiting = {each._socket.fileno(): each for each in mailboxes if each._watched}
    for fd in waiting:
        room.register(fd, select.POLLOUT)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for fd, _ in room.poll(left * 1000):
            with waiting[fd]._mutex:
                waiting[fd]._drain()
            if not waiting[fd]._watched:
                room.unregister(fd)
                del waiting[fd]


class DirectInbox:
    """Listens for direct connections, and reads what comes.

    Args:
        path: where to listen.
        poller: tells when there is something to read; in the thread that receives.
        deliver: takes a message.
    """

    def __init__(
        self,
        path: Path,
        poller: Poller,
        deliver: Callable[[Delivered], None],
    ) -> None:
        self._poller = poller
        self._deliver = deliver
        self._memory = Memory(_READ)
        self._connections: set[_Connection] = set()
        self._unwatched: list[_Connection] = []  # which the poller could not take
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(BACKLOG)
        self._listening = False
        self.listen()

    def listen(self) -> None:
        """Accepts connections; again, after the system could do no more for one."""
        try:
            while self._unwatched:
                self._watch(self._unwatched[-1])
                self._unwatched.pop()
            if not self._listening:
                self._poller.watch_readable(self._listener.fileno(), self._accept)
                self._listening = True
        except OSError as error:
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
                # It waits at the socket; see `Network.look_after_descriptors`.
                self._poller.forget(self._listener.fileno())
                self._listening = False
            return
        connection = _Connection(accepted)
        self._connections.add(connection)
        try:
            self._watch(connection)
        except OSError:
            # Its messages wait at it meanwhile: were it closed, those there already would be lost.
            self._unwatched.append(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            size = self._memory.receive(connection.socket)
            for first, buffers in connection.unpacker.feed(self._memory.view[:size]):
                if connection.identity:
                    self._deliver((connection.identity, first, buffers))
                else:
                    connection.identity = first or b""
        except BlockingIOError:
            return
        except OSError:
            size = 0
        except (ProtocolError, MemoryError) as error:
            # What follows can't be told apart; the sender will go another way. Who waits for what
            # is lost is told, see `zrpc.roll_call`.
            logger.error("a direct connection is closed: %r", error)
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
    """One that a peer has opened.

    Attributes:
        identity: whose it is; empty until it has said so.
    """

    __slots__ = ("identity", "socket", "unpacker")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = QuickSocket(accepted)
        self.unpacker = Unpacker()
        self.identity = b""
