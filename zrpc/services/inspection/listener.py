"""The Unix socket in a worker's private directory at which it is asked what it is doing.

The thread that receives looks now and then whether somebody asks. Each visitor is answered by a
thread of its own, so a worker answers as long as its Python gets to run at all, whatever the pool's
threads are doing.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from zrpc.runtime.context_thread import ContextThread

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
# How long a visitor may keep its thread waiting.
STEP_SECONDS = 10.0
_MAX_QUESTION_BYTES = 64
_CREDENTIALS = struct.Struct("3i")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the peer's process id and user id."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Listener:
    """Listens in a worker's private directory.

    For the thread that receives; afterwards another thread may call `close`.

    Args:
        directory: the private directory.
        context: of the threads that answer.
        name: of these threads.
        answer: yields the lines of the answer to a question.

    Raises:
        OSError: no descriptors are left, or the directory does not exist.
    """

    def __init__(
        self,
        directory: Path,
        context: contextvars.Context,
        name: str,
        answer: Callable[[str], Iterable[bytes]],
    ) -> None:
        self._path = directory / SOCKET
        self._context = context
        self._name = name
        self._answer = answer
        self._visits: list[tuple[threading.Thread, socket.socket]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(self._path))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise

    def admit(self) -> None:
        """Admits a visitor, without waiting for one."""
        self._visits = [visit for visit in self._visits if visit[0].is_alive()]
        if len(self._visits) == MAX_VISITORS:
            return
        try:
            connection, _ = self._socket.accept()
        except OSError:  # nobody asks, or no descriptors are left
            return
        thread = ContextThread(self._context, self._name, self._serve, (connection,))
        try:
            thread.start()
        except RuntimeError:  # the system refuses another one
            connection.close()
            return
        self._visits.append((thread, connection))

    def _serve(self, connection: socket.socket) -> None:
        """Answers one visitor, in a thread of its own."""
        with connection:
            try:
                connection.settimeout(STEP_SECONDS)
                _, user = peer_of(connection)
                if user not in (os.geteuid(), 0):
                    logger.warning("Refused to tell user %d what this worker does", user)
                    return
                question = connection.makefile("rb").readline(_MAX_QUESTION_BYTES)
                if question.endswith(b"\n"):
                    for line in self._answer(question.decode(errors="replace").strip()):
                        connection.sendall(line + b"\n")
            except OSError:  # the visitor is gone, or too slow
                pass
            except Exception:
                logger.exception("%s: a visitor gets no answer", self._name)

    def close(self) -> None:
        """Closes all connections and removes the socket."""
        for _, connection in self._visits:
            with contextlib.suppress(OSError):  # its thread has closed it
                connection.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
