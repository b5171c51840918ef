"""Where a worker is asked what it does: a Unix socket in its private directory.

Nobody waits here. The thread that receives looks now and then whether somebody asks, and writes
as much of the answer as the socket takes. So it answers as long as its Python gets to run at all,
whatever the pool's threads are doing, and no thread is there for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

__all__ = ["OTHERS", "SELF", "SOCKET", "Listener", "Visitor", "peer_of"]

logger = logging.getLogger(__name__)

# The socket's name in the worker's private directory.
SOCKET = "inspect"
# The questions: what do you do? And: what do those of your mesh do who are on other hosts?
SELF = "self"
OTHERS = "others"

# How many may ask at the same time, how long a question is, and how long it all may take.
_MOST_VISITORS = 8
_LONGEST_QUESTION = 64
_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")


def peer_of(connection: socket.socket) -> tuple[int, int] | None:
    """The process id and the user id at the other end; None where the system doesn't tell."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    data = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Visitor:
    """One that asks. For the thread that receives.

    Attributes:
        deadline: when the connection is closed, on the clock of ``time.monotonic``.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self._connection = connection
        self._question = b""
        self._answer = bytearray()
        self._finished = False
        self.closed = False

    def question(self) -> str | None:
        """The line that was asked, once; None where it is not there (yet)."""
        if b"\n" in self._question or self.closed:
            return None
        try:
            data = self._connection.recv(_LONGEST_QUESTION)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._question += data
        if not data or len(self._question) > _LONGEST_QUESTION:
            self.close()
            return None
        line, end, _ = self._question.partition(b"\n")
        return line.decode(errors="replace") if end else None

    def write(self, line: bytes) -> None:
        """Adds a line to the answer."""
        self._answer += line + b"\n"

    def finish(self) -> None:
        """There is nothing to add: the connection ends once all is written."""
        self._finished = True

    def flush(self) -> None:
        """Writes what the socket takes."""
        try:
            while self._answer and not self.closed:
                del self._answer[: self._connection.send(self._answer)]
        except BlockingIOError:
            return
        except OSError:
            self.close()
        if self._finished and not self._answer:
            self.close()

    def close(self) -> None:
        """Ends the connection."""
        self.closed = True
        self._connection.close()


class Listener:
    """Listens in a private directory. For the thread that receives, and `close` for another then.

    Args:
        directory: the worker's.
        answer: called with a visitor and its question.

    Raises:
        OSError: there are no descriptors left, or the directory is gone.
    """

    def __init__(self, directory: Path, answer: Callable[[Visitor, str], None]) -> None:
        self._path = directory / SOCKET
        self._answer = answer
        self._visitors: list[Visitor] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(self._path))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise

    def serve(self, now: float) -> None:
        """Does what there is to do, without waiting."""
        if len(self._visitors) < _MOST_VISITORS:
            self._admit(now)
        for visitor in self._visitors:
            if now > visitor.deadline:
                visitor.close()
            question = visitor.question()
            if question is not None:
                self._reply(visitor, question)
            visitor.flush()
        if self._visitors:
            self._visitors = [visitor for visitor in self._visitors if not visitor.closed]

    def _reply(self, visitor: Visitor, question: str) -> None:
        try:
            self._answer(visitor, question)
        except Exception:
            visitor.close()  # or it would be asked again
            raise

    def _admit(self, now: float) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # nobody, or no descriptors
            return
        connection.setblocking(False)
        peer = peer_of(connection)
        if peer is not None and peer[1] not in (os.geteuid(), 0):
            logger.warning("Refused to tell user %d what this worker does", peer[1])
            connection.close()
            return
        self._visitors.append(Visitor(connection, now + _SECONDS))

    def close(self) -> None:
        """Ends all connections and removes the socket."""
        for visitor in self._visitors:
            visitor.close()
        self._visitors.clear()
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
