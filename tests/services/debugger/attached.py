"""A debugger's terminal, played by a test."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from tests.support.waiting import SOON, until
from zrpc.testing import Mesh


class Attached:
    """A connection to a worker that stands at a breakpoint, as that of ``zrpc debug``."""

    def __init__(self, mesh: Mesh, worker: int) -> None:
        membership = mesh.agent(worker).membership
        path = Path(membership.records[membership.own_id].directory) / "debug"
        until(path.exists, "the worker stands at a breakpoint")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SOON)
        self._socket.connect(str(path))
        self._seen = ""

    def read_until(self, text: str) -> str:
        """Returns what the worker writes, up to a text."""
        deadline = time.monotonic() + SOON
        while text not in self._seen:
            assert time.monotonic() < deadline, self._seen
            data = self._socket.recv(4096)
            assert data, f"no {text!r} before the end, but {self._seen!r}"
            self._seen += data.decode()
        seen, _, self._seen = self._seen.partition(text)
        return seen + text

    def send(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())

    def read_to_end(self) -> str:
        return self._seen + b"".join(iter(lambda: self._socket.recv(4096), b"")).decode()
