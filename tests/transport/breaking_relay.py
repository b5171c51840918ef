"""A relay before a worker's TCP port, which breaks connections.

Unlike the relays of `zrpc.testing.faults` it works below encryption: it counts bytes, not
messages, and resets connections.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from pathlib import Path
from types import TracebackType

from tests.support.waiting import SOON
from zrpc.testing import Mesh

_RESET = struct.pack("ii", 1, 0)


class BreakingRelay:
    """Relays connections to a port of this machine, in one thread.

    Attributes:
        endpoint: the relay's own endpoint.
        heard: the bytes sent on to the target.
        broken: set when `break_after` has broken the connections.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = threading.Event()
        self.heard = bytearray()
        # The lock guards _left.
        self._lock = threading.Lock()
        self._left: int | None = None
        # For each end of a connection, the other end and whether that is the target.
        self._ends: dict[socket.socket, tuple[socket.socket, bool]] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for each in (self._listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        self._closed = False
        self._to_swallow = 0
        self._swallowed: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @classmethod
    def before(cls, mesh: Mesh, sender: int, receiver: int) -> BreakingRelay:
        """Returns a relay from a worker to another, to which it has sent nothing yet."""
        network = mesh.agent(sender).network
        relay = cls(network.endpoint(receiver))
        endpoints = [network.endpoint(rank) for rank in range(len(mesh))]
        endpoints[receiver] = relay.endpoint
        network.connect(endpoints)
        return relay

    @property
    def all_read(self) -> bool:
        """Whether the target has read all that was sent on to it."""
        ports = {end.getsockname()[1] for end, is_target in self._ends.values() if is_target}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        unread = {int(row[2].split(":")[1], 16) for row in rows if int(row[4].split(":")[1], 16)}
        return not ports & unread

    def break_after(self, count: int) -> None:
        """Breaks all connections when ``count`` more bytes have been sent on to the target.

        The current connections carry no byte after that.
        """
        with self._lock:
            self._left = count
            self.broken.clear()
        self._waker.send(b"!")

    def swallow(self, connections: int) -> None:
        """Lets nothing through of the next connections, which stay open: to break without a word.

        The current ones are broken.
        """
        self._to_swallow = connections
        self.break_after(0)

    def __enter__(self) -> BreakingRelay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        self._waker.send(b"!")
        self._thread.join(SOON)
        for each in (self._listener, self._waker, self._woken, *self._ends, *self._swallowed):
            each.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                self._on_readable(key.fileobj)  # type: ignore[arg-type]

    def _on_readable(self, end: socket.socket) -> None:
        if end is self._listener:
            self._accept()
        elif end is self._woken:
            end.recv(64)
            with self._lock:
                if self._left == 0:
                    self._break()
        elif end in self._ends:
            self._relay(end)

    def _accept(self) -> None:
        client = self._listener.accept()[0]
        if self._to_swallow:
            self._to_swallow -= 1
            self._swallowed.append(client)
            return
        try:
            server = socket.create_connection(self._target)
        except ConnectionRefusedError:  # the target listens no more
            client.close()
            return
        for one, other, forward in ((client, server, True), (server, client, False)):
            self._ends[one] = other, forward
            self._selector.register(one, selectors.EVENT_READ)

    def _relay(self, end: socket.socket) -> None:
        other, forward = self._ends[end]
        with self._lock:
            limit = 1 << 16
            if forward and self._left is not None:
                limit = min(limit, self._left)
            data = b""
            with contextlib.suppress(ConnectionError):
                data = end.recv(limit)
                self.heard += data * forward
                other.sendall(data)
            if not data:
                self._drop(end)
            elif forward and self._left is not None:
                self._left -= len(data)
                if not self._left:
                    self._break()

    def _break(self) -> None:
        for end in list(self._ends):
            if end in self._ends:
                self._drop(end)
        self._left = None
        self.broken.set()

    def _drop(self, end: socket.socket) -> None:
        """Resets a connection; the target still gets the bytes sent on to it."""
        for each in (end, self._ends[end][0]):
            self._selector.unregister(each)
            _, is_clients = self._ends.pop(each)
            if is_clients:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            each.close()
