"""A worker process that is measured: does what it is told over a socket, one by one.

The requests, and the replies, one for each:

    ("join",)                                   join the mesh, if it is one
    ("measure", workload, arguments, effort)    the value is a `Sample`
    ("leave",)                                  leave the mesh and end the process

    (True, value)
    (False, what went wrong, in a line)
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zrpc.bench.effort import Effort, Sample
from zrpc.bench.library import LIBRARIES, Library, load
from zrpc.bench.session import Session

if TYPE_CHECKING:
    from zrpc.bench.raw import RawPeer

__all__ = ["MemberSettings", "main", "one_line"]


@dataclass(frozen=True)
class MemberSettings:
    """What a member has to know.

    Attributes:
        participant: a library's name, or ``limit``.
        rank: its rank.
        workers: how many there are.
        joined: whether they form a mesh.
        tcp: whether only tcp is to be used.
        home: the mesh's directory.
        socket: the descriptor of the socket for requests and replies.
    """

    participant: str
    rank: int
    workers: int
    joined: bool
    tcp: bool
    home: str
    socket: int


def main(settings: MemberSettings) -> NoReturn:
    """The life of a member, until it is told to leave or the benchmark is gone."""
    member = _Member(settings)
    connection = Connection(settings.socket)
    with contextlib.suppress(EOFError, ConnectionError):
        leaving = False
        while not leaving:
            request, *arguments = connection.recv()
            leaving = request == "leave"
            try:
                reply: tuple[bool, Any] = True, getattr(member, request)(*arguments)
            except BaseException as error:
                reply = False, one_line(error)
            connection.send(reply)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own end would free torch in memory that is shared with the server.
    os._exit(0)


def one_line(error: BaseException) -> str:
    """An error's type and what it says, up to the first line's end."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


class _Member:
    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings
        self._library: Library | None = None
        self._raw: RawPeer | None = None
        self._echo: Any = None

    def join(self) -> None:
        settings = self._settings
        if not settings.joined:
            return
        if settings.participant not in LIBRARIES:
            self._open_raw()
            return
        library = load(settings.participant)
        library.join(
            settings.rank,
            settings.workers,
            tcp=settings.tcp,
            init_method=f"file://{settings.home}/store",
        )
        self._library = library

    def _open_raw(self) -> None:
        from zrpc.bench.raw import RawEcho, RawPeer

        endpoint = Path(self._settings.home, "endpoint")
        if self._settings.rank == 1:
            tcp = "tcp://127.0.0.1:*"
            self._echo = RawEcho(tcp if self._settings.tcp else f"ipc://{endpoint.parent}/raw")
            endpoint.write_text(self._echo.endpoint)
        elif self._settings.rank == 0:
            self._raw = RawPeer(endpoint.read_text())

    def measure(self, workload: str, arguments: tuple[Any, ...], effort: Effort) -> Sample:
        module, _, name = workload.partition(":")
        function = getattr(importlib.import_module(f"zrpc.bench.{module}"), name)
        session = Session(
            self._settings.participant,
            effort,
            self._settings.workers,
            _library=self._library,
            _raw=self._raw,
        )
        sample: Sample = function(session, *arguments)
        return sample

    def leave(self) -> None:
        if self._library is not None:
            self._library.leave()
