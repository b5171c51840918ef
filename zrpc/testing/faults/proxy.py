"""Relays before the inboxes of a mesh under test, which can disturb its connections.

A worker's Unix socket is renamed, and a relay listens under the old name. So every byte between
the workers goes through this process, heartbeats included, unknown to them and to ZeroMQ. The
workers have no direct connections. One thread, with an event loop, serves all relays of a mesh.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zrpc.testing.faults.zmtp import GREETING, Unit, Units
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
        self._closed = False
        self._listeners = [self._interpose(inbox) for inbox in inboxes]
        self._inboxes = [_aside(inbox) for inbox in inboxes]
        self._loop = asyncio.new_event_loop()
        self._change = asyncio.Event()  # set, and replaced, when a stream may have to go on
        self._thread = threading.Thread(target=self._run, name="zrpc-test-relays", daemon=True)
        self._thread.start()

    def link(self, sender: int, receiver: int) -> _Link:
        """Returns what disturbs one worker's way to another; the caller holds the lock."""
        return self._links.setdefault((sender, receiver), [])

    def changed(self) -> None:
        """Makes changes of faults take effect."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.wake)

    def mend(self) -> None:
        """Ends all faults."""
        with self.lock:
            self._links.clear()
        self.changed()

    def close(self) -> None:
        """Stops the thread, and closes all connections."""
        self._closed = True
        self.changed()
        self._thread.join(_JOIN_SECONDS)

    @staticmethod
    def _interpose(inbox: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        os.rename(inbox, _aside(inbox))
        # Direct connections would bypass the relay; without this socket, all bytes go by ZeroMQ.
        with contextlib.suppress(FileNotFoundError):
            inbox.with_name(DIRECT).unlink()
        listener.bind(str(inbox))
        listener.listen(1024)
        return listener

    # -- in the thread -------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels all tasks
            runner.run(self._serve())

    async def _serve(self) -> None:
        servers = [
            await asyncio.start_unix_server(
                partial(self._relay, rank), sock=listener, limit=_READ_BYTES
            )
            for rank, listener in enumerate(self._listeners)
        ]
        await self.until(lambda: self._closed)
        for server in servers:
            server.close()

    def wake(self) -> None:
        """Makes all streams look again whether they can go on."""
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Waits until something holds, which is tried again after each `wake`."""
        while not ready():
            await self._change.wait()

    def rank_of(self, routing_id: bytes) -> int | None:
        """Returns the rank of the worker that connects with a routing id, if it is a member."""
        # Those of a mailbox and of heartbeats differ in the first byte only.
        return self._tokens.get(identity_of(routing_id)[1:])

    async def _relay(self, rank: int, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            inbox = await asyncio.open_unix_connection(self._inboxes[rank], limit=_READ_BYTES)
        except OSError:  # the worker is gone, and its socket too
            writer.transport.abort()
            return
        streams = _Stream(reader, inbox[1]), _Stream(inbox[0], writer)
        await _Connection(self, rank, *streams).run()


class _Stream:
    """One direction of a connection: what was read, and when to send it on."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        self.held = 0
        writer.transport.set_write_buffer_limits(0)  # a cut holds back all but one piece

    def put(self, data: bytes, link: _Link, copies: int = 1) -> None:
        """Queues bytes, to be sent on after the delays of the link."""
        due = time.monotonic() + sum(each.delay for each in link)
        for _ in range(copies):
            self.queue.put_nowait((due, data))
            self.held += len(data)


class _Connection:
    """A connection through a relay: from a worker that connects to one that listens."""

    def __init__(self, relays: Relays, receiver: int, forward: _Stream, backward: _Stream) -> None:
        self._relays = relays
        self._receiver = receiver
        self._forward = forward
        self._backward = backward
        self._known = False  # whether `_sender` is set; it stays None for a non-member
        self._sender: int | None = None

    async def run(self) -> None:
        """Sends on what comes, until one side closes the connection."""
        sending = [self._send(stream) for stream in (self._forward, self._backward)]
        work = [
            *sending,
            self._take(self._forward, self._take_forward()),
            self._take(self._backward, self._take_backward()),
        ]
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.wait(tasks[: len(sending)], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for stream in (self._forward, self._backward):
                stream.writer.transport.abort()

    def _links(self) -> tuple[_Link, _Link]:
        """Returns what disturbs it, forward and backward; the caller holds the lock."""
        if self._sender is None:
            return [], []
        pair = self._sender, self._receiver
        return self._relays.link(*pair), self._relays.link(*reversed(pair))

    def _is_cut(self) -> bool:
        return any(each.cut for link in self._links() for each in link)

    def _is_readable(self, stream: _Stream) -> bool:
        with self._relays.lock:
            return stream.held < _MAX_HELD_BYTES and not self._is_cut()

    async def _take(self, stream: _Stream, taking: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            await taking
        stream.queue.put_nowait(None)

    async def _readable(self, stream: _Stream) -> None:
        await self._relays.until(partial(self._is_readable, stream))

    async def _take_forward(self) -> None:
        await self._take_greeting(self._forward)
        units = Units(self._forward.reader)
        beats = False
        while True:
            await self._readable(self._forward)
            unit = await units.read()
            if unit.routing_id is not None and not self._known:
                self._known, self._sender = True, self._relays.rank_of(unit.routing_id)
                self._relays.wake()
                beats = unit.routing_id[:1] == bytes([HEARTBEAT_LETTER])
            with self._relays.lock:
                link = self._links()[0]
                # A message of the heartbeats' connection is a greeting.
                self._forward.put(unit.data, link, 1 if beats else _copies(link, unit))

    async def _take_backward(self) -> None:
        await self._take_greeting(self._backward)
        # One that is cut off must not see more before it is known.
        await self._relays.until(lambda: self._known)
        while True:
            await self._take_bytes(self._backward, _READ_BYTES)

    async def _take_greeting(self, stream: _Stream) -> None:
        left = GREETING  # a part of it may come only after a part of the other side's
        while left:
            left -= await self._take_bytes(stream, left)

    async def _take_bytes(self, stream: _Stream, limit: int) -> int:
        await self._readable(stream)
        if not (data := await stream.reader.read(limit)):
            raise EOFError
        with self._relays.lock:
            stream.put(data, self._links()[stream is self._backward])
        return len(data)

    async def _send(self, stream: _Stream) -> None:
        """Sends on the bytes that are due, until the end of the queue."""
        with contextlib.suppress(OSError):
            while (held := await stream.queue.get()) is not None:
                due, data = held
                while (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                for begin in range(0, len(data), _READ_BYTES):
                    piece = data[begin : begin + _READ_BYTES]
                    await self._relays.until(partial(self._begins_to_send, stream, piece))
                    await stream.writer.drain()
                stream.held -= len(data)
                self._relays.wake()

    def _begins_to_send(self, stream: _Stream, data: bytes) -> bool:
        with self._relays.lock:
            if self._is_cut():
                return False
            stream.writer.write(data)
            return True


def _aside(inbox: Path) -> Path:
    return inbox.with_name("relayed")
