"""The Unix socket in a worker's private directory at which it is asked what it is doing.

No thread waits here. The thread that receives looks now and then whether somebody asks, and writes
as much of the answer as the socket takes. So a worker answers as long as its Python gets to run at
all, whatever the pool's threads are doing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

__all__ = ["NUMBERS", "OTHERS", "SELF", "SOCKET", "Listener", "Visitor", "peer_of"]

logger = logging.getLogger(__name__)

# The socket's name in the worker's private directory. Not longer than that of the socket for direct
# connections: a directory is chosen by the room that its path leaves for that.
SOCKET = "stacks"
# The questions: what are you doing? What are the members on other hosts doing? And with what is
# added to each of them: what have they done so far, in numbers?
SELF = "self"
OTHERS = "others"
NUMBERS = " in numbers"

# How many may ask at the same time.
MAX_VISITORS = 8
# How long a question and its answer may take.
_VISIT_SECONDS = 10.0
_MAX_QUESTION_BYTES = 64
_CREDENTIALS = struct.Struct("3i")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the peer's process id and user id."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Visitor:
    """A connection of somebody who asks. For the thread that receives.

    Attributes:
        deadline: when the connection is closed, on the clock of ``time.monotonic``.
        closed: whether it is closed.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self._connection = connection
        self._question = b""
        self._answer = bytearray()
        self._finished = False
        self.closed = False

    def question(self) -> str | None:
        """Returns the line that was asked, once; None if it has not arrived, or never will."""
        if b"\n" in self._question or self.closed:
            return None
        try:
            data = self._connection.recv(_MAX_QUESTION_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._question += data
        if not data or len(self._question) > _MAX_QUESTION_BYTES:
            self.close()
            return None
        line, end, _ = self._question.partition(b"\n")
        return line.decode(errors="replace") if end else None

    def write(self, line: bytes) -> None:
        """Adds a line to the answer."""
        self._answer += line + b"\n"

    def finish(self) -> None:
        """Ends the answer: the connection is closed once all of it is written."""
        self._finished = True

    def flush(self) -> None:
        """Writes as much of the answer as the socket takes."""
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
        """Closes the connection."""
        self.closed = True
        self._connection.close()


class Listener:
    """Listens in a worker's private directory.

    For the thread that receives; afterwards another thread may call `close`. ``answer`` is called
    with a visitor and its question.

    Raises:
        OSError: no descriptors are left, or the directory does not exist.
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
        """Admits, reads from and writes to visitors, without waiting."""
        if len(self._visitors) < MAX_VISITORS:
            self._admit_visitor(now)
        for visitor in self._visitors:
            if now > visitor.deadline:
                visitor.close()
            question = visitor.question()
            if question is not None:
                try:
                    self._answer(visitor, question)
                except Exception:
                    visitor.close()  # or it would be asked again
                    raise
            visitor.flush()
        self._visitors = [visitor for visitor in self._visitors if not visitor.closed]

    def _admit_visitor(self, now: float) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # nobody asks, or no descriptors are left
            return
        connection.setblocking(False)
        _, user = peer_of(connection)
        if user not in (os.geteuid(), 0):
            logger.warning("Refused to tell user %d what this worker does", user)
            connection.close()
            return
        self._visitors.append(Visitor(connection, now + _VISIT_SECONDS))

    def close(self) -> None:
        """Closes all connections and removes the socket."""
        for visitor in self._visitors:
            visitor.close()
        self._visitors.clear()
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
