"""Relays before the inboxes of a mesh under test, which can disturb its connections.

A worker's Unix socket is renamed, and a relay listens under the old name. So every byte between
the workers goes through this process, heartbeats included, unknown to them and to ZeroMQ. The
workers have no direct connections. One thread serves all relays of a mesh.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zrpc.testing.faults.zmtp import GREETING, Splitter, Unit
from zrpc.transport.address import DIRECT
from zrpc.transport.identity import HEARTBEAT_LETTER, identity_of

_READ_BYTES = 1 << 18
# A connection that holds back this much is no longer read.
_MAX_HELD_BYTES = 1 << 28
_JOIN_SECONDS = 5.0


@dataclass(eq=False)
class Disturbance:
    """What a fault does to each link that it disturbs.

    Attributes:
        cut: whether it cuts the link.
        delay: by how many seconds it slows the link.
        copies: how many times each message is sent on: 0 drops it.
        left: the number of messages that it still drops or duplicates; None for all.
        happened: the number of messages that it has dropped or duplicated.
    """

    cut: bool = False
    delay: float = 0.0
    copies: int = 1
    left: int | None = 0
    happened: int = 0


# What disturbs one direction, from one worker to another.
_Link = list[Disturbance]


def _is_cut(*links: _Link) -> bool:
    return any(each.cut for link in links for each in link)


def _copies(link: _Link, unit: Unit) -> int:
    """Returns how many times to send on the next unit; the first that isn't used up decides."""
    each = next((each for each in link if each.left != 0), None)
    if each is None or not unit.is_message:
        return 1
    each.happened += 1
    if each.left is not None:
        each.left -= 1
    return each.copies


class Relays:
    """The relays of one mesh, and the thread that serves them.

    Args:
        inboxes: the workers' Unix sockets, by rank; no worker has connected to them yet.
        tokens: the rank of each worker, by the token in its routing ids.

    `link` and `close` may be called from any thread.
    """

    def __init__(self, inboxes: list[Path], tokens: Mapping[bytes, int]) -> None:
        self._tokens = tokens
        # The lock guards the faults. `changed` must be called after each change.
        self.lock = threading.Lock()
        self._links: dict[tuple[int, int], _Link] = {}
        self._connections: list[_Connection] = []
        self._waker, self._woken = socket.socketpair()
        self._closed = False
        self._listeners = [self._interpose(inbox) for inbox in inboxes]
        self._inboxes = [_aside(inbox) for inbox in inboxes]
        self._thread = threading.Thread(target=self._serve, name="zrpc-test-relays", daemon=True)
        self._thread.start()

    def link(self, sender: int, receiver: int) -> _Link:
        """Returns what disturbs one worker's way to another; the caller holds the lock."""
        return self._links.setdefault((sender, receiver), [])

    def changed(self) -> None:
        """Makes changes of faults take effect."""
        self._waker.send(b"!")

    def mend(self) -> None:
        """Ends all faults."""
        with self.lock:
            self._links.clear()
        self.changed()

    def close(self) -> None:
        """Stops the thread, and closes all connections."""
        if self._closed:
            return
        self._closed = True
        self.changed()
        self._thread.join(_JOIN_SECONDS)
        for each in [*self._listeners, self._waker, self._woken]:
            each.close()
        for connection in self._connections:
            connection.close()

    @staticmethod
    def _interpose(inbox: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        os.rename(inbox, _aside(inbox))
        # Direct connections would bypass the relay; without this socket, all bytes go by ZeroMQ.
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
                waits = [self._register(each, interest) for each in self._connections]
            ready = _poll(interest, min(waits, default=math.inf))
            if ready.get(self._woken.fileno()):
                self._woken.recv(4096)
            for rank, listener in enumerate(self._listeners):
                if ready.get(listener.fileno()):
                    self._accept(listener, rank)
            with self.lock:
                for connection in list(self._connections):
                    self._pump(connection, ready)

    def _register(self, connection: _Connection, interest: dict[int, int]) -> float:
        """Adds the events to wait for on a connection; returns the longest wait in seconds."""
        if _is_cut(*self._links_of(connection)):
            return math.inf
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
        return min(waits, default=math.inf)

    def _links_of(self, connection: _Connection) -> tuple[_Link, _Link]:
        """Returns what disturbs a connection, forward and backward."""
        if connection.sender is None:
            return [], []
        pair = connection.sender, connection.receiver
        return self.link(*pair), self.link(*reversed(pair))

    def _accept(self, listener: socket.socket, rank: int) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = listener.accept()
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._inboxes[rank]))
            except OSError:  # the worker is gone, and its socket too
                client.close()
                server.close()
                return
            self._connections.append(_Connection(client, server, rank))

    def _pump(self, connection: _Connection, ready: Mapping[int, int]) -> None:
        for index, stream in enumerate(connection.streams):
            links = self._links_of(connection)
            if _is_cut(*links):
                return
            if ready.get(stream.source.fileno()) and stream.readable(connection.known):
                self._read(connection, stream, links[index])
            stream.write(time.monotonic())
        if any(each.broken or (each.ended and not each.queue) for each in connection.streams):
            connection.close()
            self._connections.remove(connection)

    def _read(self, connection: _Connection, stream: _Stream, link: _Link) -> None:
        data = stream.read(connection.known)
        if stream is connection.streams[0]:
            units = connection.splitter.feed(data)
            if connection.splitter.ready and not connection.known:
                connection.known = True
                # The routing ids of a mailbox and of heartbeats differ in the first byte only.
                connection.sender = self._tokens.get(identity_of(connection.splitter.identity)[1:])
                link = self._links_of(connection)[0]
        else:
            units = [Unit(data, False)] if data else []
        due = time.monotonic() + sum(each.delay for each in link)
        for unit in units:
            # A message of the heartbeats' connection is a greeting.
            copies = 1 if connection.beats else _copies(link, unit)
            stream.put(unit.data, due, copies)


class _Stream:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, backward: bool) -> None:
        self.source = source
        self.sink = sink
        self.queue: deque[tuple[float, memoryview]] = deque()
        self.ended = False
        self.broken = False
        self._held = 0
        # Backward, only the greeting is sent on until the connecting worker is known: one that is
        # cut off must not see the rest.
        self._before_known = GREETING if backward else None

    def readable(self, known: bool) -> bool:
        """Returns whether to read more."""
        if not known and self._before_known == 0:
            return False
        return not self.ended and self._held < _MAX_HELD_BYTES

    def read(self, known: bool) -> bytes:
        """Returns the bytes that have arrived; empty if there are none."""
        limit = _READ_BYTES if known or self._before_known is None else self._before_known
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
        """Queues bytes, to be sent on at the time ``due``."""
        for _ in range(copies):
            self.queue.append((due, memoryview(data)))
            self._held += len(data)

    def write(self, now: float) -> None:
        """Sends on the bytes that are due."""
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
    """A connection through a relay: from a worker that connects to one that listens."""

    def __init__(self, client: socket.socket, server: socket.socket, receiver: int) -> None:
        for each in (client, server):
            each.setblocking(False)
        self.receiver = receiver
        self.known = False  # whether `sender` is set; it stays None for a non-member
        self.sender: int | None = None
        self.splitter = Splitter()
        forward = _Stream(client, server, backward=False)
        self.streams = (forward, _Stream(server, client, backward=True))

    @property
    def beats(self) -> bool:
        """Whether it carries heartbeats only."""
        return self.splitter.identity[:1] == bytes([HEARTBEAT_LETTER])

    def close(self) -> None:
        for stream in self.streams:
            stream.source.close()


def _aside(inbox: Path) -> Path:
    return inbox.with_name("relayed")


def _poll(interest: Mapping[int, int], wait: float) -> dict[int, int]:
    """Returns the events that happen within ``wait`` seconds, which may be infinite."""
    poll = select.poll()
    for fd, mask in interest.items():
        poll.register(fd, mask)
    return dict(poll.poll(None if wait == math.inf else int(wait * 1000) + 1))
