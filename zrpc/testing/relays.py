"""Relays: they stand before the inboxes of a mesh under test, and can do harm.

A worker's Unix socket is given another name, and a relay listens under the old one. All that the
workers say to each other so goes through this process byte by byte, heartbeats too, and neither
they nor ZeroMQ know; they have no direct connections. One thread serves all relays of a mesh.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from zrpc.testing.zmtp import GREETING, Splitter, Unit
from zrpc.transport.address import DIRECT

__all__ = ["Link", "Mischief", "Relays"]

_CHUNK = 1 << 18
# What a connection holds back at most, in bytes; then it is not read.
_MOST_HELD = 1 << 28
_JOIN_TIMEOUT = 5.0


class Mischief:
    """What is done to messages on one link, in one direction.

    Args:
        copies: how many times each is sent on: 0 drops it.
        count: to how many messages; None for all.

    Attributes:
        happened: to how many it was done.
    """

    def __init__(self, copies: int, count: int | None) -> None:
        self.copies = copies
        self.left = count
        self.happened = 0


class Link:
    """The faults of one direction: from one worker to another.

    Attributes:
        cuts: how many faults have cut it.
        delays: of each fault that slows it, in seconds.
        mischiefs: what is done to its messages; the first that has some left.
    """

    def __init__(self) -> None:
        self.cuts = 0
        self.delays: list[float] = []
        self.mischiefs: list[Mischief] = []

    def copies(self, unit: Unit) -> int:
        """How many times to send on the next unit."""
        if unit.is_message:
            for mischief in self.mischiefs:
                if mischief.left != 0:
                    mischief.happened += 1
                    if mischief.left is not None:
                        mischief.left -= 1
                    return mischief.copies
        return 1


class Relays:
    """The relays of one mesh, and the thread that serves them.

    Args:
        inboxes: the workers' Unix sockets, by rank; nobody has connected to them yet.
        tokens: what each worker's routing ids end in, with its rank.

    `link` and `close` may be called from any thread.
    """

    def __init__(self, inboxes: list[Path], tokens: Mapping[bytes, int]) -> None:
        self._tokens = tokens
        # Guards the faults. `changed` is to be called after each change.
        self.lock = threading.Lock()
        self._links: dict[tuple[int, int], Link] = {}
        self._connections: list[_Connection] = []
        self._waker, self._woken = socket.socketpair()
        self._closed = False
        self._listeners = [self._interpose(inbox) for inbox in inboxes]
        self._inboxes = [_aside(inbox) for inbox in inboxes]
        self._thread = threading.Thread(target=self._serve, name="zrpc-test-relays", daemon=True)
        self._thread.start()

    def link(self, sender: int, receiver: int) -> Link:
        """The faults from one worker to another; the lock is held."""
        return self._links.setdefault((sender, receiver), Link())

    def changed(self) -> None:
        """Has faults take effect that were changed."""
        self._waker.send(b"!")

    def mend(self) -> None:
        """Ends all faults."""
        with self.lock:
            self._links.clear()
        self.changed()

    def close(self) -> None:
        """Ends the thread, and closes all connections."""
        if self._closed:
            return
        self._closed = True
        self.changed()
        self._thread.join(_JOIN_TIMEOUT)
        for each in [*self._listeners, self._waker, self._woken]:
            each.close()
        for connection in self._connections:
            connection.close()

    @staticmethod
    def _interpose(inbox: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        os.rename(inbox, _aside(inbox))
        # What goes past ZeroMQ would go past the relay; without this socket, all goes by ZeroMQ.
        with contextlib.suppress(FileNotFoundError):
            inbox.with_name(DIRECT).unlink()
        listener.bind(str(inbox))
        listener.listen(1024)
        listener.setblocking(False)
        return listener

    # -- in the thread -------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed:
            interest: dict[int, int] = {self._woken.fileno(): select.POLLIN}
            interest |= {listener.fileno(): select.POLLIN for listener in self._listeners}
            with self.lock:
                soon = [self._arrange(each, interest) for each in self._connections]
            ready = _poll(interest, min(soon, default=None, key=_or_never))
            if ready.get(self._woken.fileno()):
                self._woken.recv(4096)
            for rank, listener in enumerate(self._listeners):
                if ready.get(listener.fileno()):
                    self._accept(listener, rank)
            with self.lock:
                for connection in list(self._connections):
                    self._pump(connection, ready)

    def _arrange(self, connection: _Connection, interest: dict[int, int]) -> float | None:
        """What to wait for on a connection, and for how long at most."""
        there, back = self._links_of(connection)
        if there.cuts or back.cuts:
            return None
        now = time.monotonic()
        waits = []
        for stream in connection.streams:
            if stream.readable(connection.known):
                fd = stream.source.fileno()
                interest[fd] = interest.get(fd, 0) | select.POLLIN
            if stream.queue:
                fd, due = stream.sink.fileno(), stream.queue[0][0]
                if due <= now:
                    interest[fd] = interest.get(fd, 0) | select.POLLOUT
                else:
                    waits.append(due - now)
        return min(waits, default=None)

    def _links_of(self, connection: _Connection) -> tuple[Link, Link]:
        """The faults on the way of a connection, there and back."""
        if connection.sender is None:
            return Link(), Link()
        pair = connection.sender, connection.receiver
        return self.link(*pair), self.link(*reversed(pair))

    def _accept(self, listener: socket.socket, rank: int) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = listener.accept()
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._inboxes[rank]))
            except OSError:  # the worker is gone, and its socket with it
                client.close()
                server.close()
                return
            self._connections.append(_Connection(client, server, rank))

    def _pump(self, connection: _Connection, ready: Mapping[int, int]) -> None:
        there, back = connection.streams
        for stream in (there, back):
            links = self._links_of(connection)
            if any(link.cuts for link in links):
                return
            if ready.get(stream.source.fileno()) and stream.readable(connection.known):
                link = links[0] if stream is there else links[1]
                self._read(connection, stream, link)
            stream.write(time.monotonic())
        if any(stream.broken or (stream.ended and not stream.queue) for stream in (there, back)):
            connection.close()
            self._connections.remove(connection)

    def _read(self, connection: _Connection, stream: _Stream, link: Link) -> None:
        data = stream.read(connection.known)
        if stream is connection.streams[0]:
            units = connection.splitter.feed(data)
            if connection.splitter.ready and not connection.known:
                connection.known = True
                # A mailbox's routing id and that of heartbeats differ in the first byte only.
                connection.sender = self._tokens.get(connection.splitter.identity[1:])
                link = self._links_of(connection)[0]
        else:
            units = [Unit(data, False)] if data else []
        due = time.monotonic() + sum(link.delays)
        for unit in units:
            stream.put(unit.data, due, link.copies(unit))


class _Stream:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        self.source = source
        self.sink = sink
        self.queue: deque[tuple[float, memoryview]] = deque()
        self.ended = False
        self.broken = False
        self._held = 0
        # Of the way back, no more than the greeting goes on until it is known who asks: whoever
        # is cut off must not see the rest.
        self._before_known = GREETING if back else None

    def readable(self, known: bool) -> bool:
        """Whether to read on."""
        if not known and self._before_known == 0:
            return False
        return not self.ended and self._held < _MOST_HELD

    def read(self, known: bool) -> bytes:
        """The next bytes there are."""
        limit = _CHUNK if known or self._before_known is None else self._before_known
        try:
            data = self.source.recv(limit)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.ended = not data
        if not known and self._before_known is not None:
            self._before_known -= len(data)
        return data

    def put(self, data: bytes, due: float, copies: int) -> None:
        """Queues bytes, to be sent on at a time."""
        for _ in range(copies):
            self.queue.append((due, memoryview(data)))
            self._held += len(data)

    def write(self, now: float) -> None:
        """Sends on what is due."""
        while self.queue and self.queue[0][0] <= now:
            due, data = self.queue[0]
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
                return
            self._held -= sent
            if sent == len(data):
                self.queue.popleft()
            else:
                self.queue[0] = (due, data[sent:])


class _Connection:
    """A connection by way of a relay: from a worker that connects to one that listens."""

    def __init__(self, client: socket.socket, server: socket.socket, receiver: int) -> None:
        for each in (client, server):
            each.setblocking(False)
        self.receiver = receiver
        self.known = False  # it is known who connects: `sender`, None for a stranger
        self.sender: int | None = None
        self.splitter = Splitter()
        self.streams = (_Stream(client, server, back=False), _Stream(server, client, back=True))

    def close(self) -> None:
        for stream in self.streams:
            stream.source.close()


def _aside(inbox: Path) -> Path:
    return inbox.with_name("relayed")


def _or_never(wait: float | None) -> float:
    return float("inf") if wait is None else wait


def _poll(interest: Mapping[int, int], wait: float | None) -> dict[int, int]:
    """What is ready of what is waited for, at most ``wait`` seconds; None for any time."""
    poll = select.poll()
    for fd, mask in interest.items():
        poll.register(fd, mask)
    return dict(poll.poll(None if wait is None else int(wait * 1000) + 1))
