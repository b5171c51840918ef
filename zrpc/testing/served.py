"""A process that serves requests, one by one, over a connection: both of its ends.

It imports as little as possible: the benchmark measures the memory of such processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from zrpc.launch import Starter, Task

# Above the descriptor numbers that a preloaded module could have open in the starter's server.
_FIRST_SOCKET_FD = 200


def start_serving(
    starter: Starter, task: Callable[[int], Task], stdout: int, stderr: int
) -> tuple[int, Connection]:
    """Starts a process that serves requests; returns its process id and the connection to it.

    Args:
        starter: starts it.
        task: returns its task, which calls `serve`, given the descriptor of its end.
        stdout: its standard output.
        stderr: its standard error.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _FIRST_SOCKET_FD)
        try:
            pid = starter.spawn(task(fd), stdout=stdout, stderr=stderr, pass_fds=[fd])
        finally:
            os.close(fd)
        connection = Connection(ours.fileno())
        ours.detach()  # not before: if this is interrupted, the process sees that its peer is gone
        return pid, connection


def serve(fd: int, reply: Callable[..., bytes]) -> None:
    """Serves requests until one says to exit, or until the process that sends them is gone.

    Args:
        fd: the descriptor of this process's end.
        reply: called with the parts of a request; returns the reply to it.
    """
    connection = Connection(fd)
    with contextlib.suppress(EOFError, ConnectionError):
        while (request := pickle.loads(connection.recv_bytes())) != ("exit",):
            connection.send_bytes(reply(*request))
            del request  # otherwise it would live until the next one


def send_request(connection: Connection, *request: Any) -> None:
    """Sends a request; if the process is dead, the wait for its reply shows that."""
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(request))
