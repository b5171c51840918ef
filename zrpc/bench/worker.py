"""A worker process that is measured. It handles one request after another from a socket.

The requests:

    ("join",)                                     join the mesh, if there is one
    ("measure", workload, arguments, sampling)    the value is a `Sample`
    ("leave",)                                    leave the mesh

Each gets one of these replies:

    (True, value)
    (False, the error in one line)
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zrpc.bench.library import ACTOR_LIBRARIES, LIBRARIES, Library, WorkerSettings, load
from zrpc.bench.session import Sample, Sampling, Session
from zrpc.testing.served import serve

if TYPE_CHECKING:
    from zrpc.bench.raw_zmq import RawPeer


def main(settings: WorkerSettings) -> NoReturn:
    """Serves requests until one says to exit, or until the benchmark's process is gone."""
    serve(settings.socket, _Worker(settings).do)
    sys.stdout.flush()
    sys.stderr.flush()
    # A regular exit would free torch, and so copy memory that is shared with the fork server.
    os._exit(0)


def one_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._library: Library | None = None
        self._raw: RawPeer | None = None

    def do(self, request: str, *arguments: Any) -> bytes:
        try:
            return pickle.dumps((True, getattr(self, request)(*arguments)))
        except BaseException as error:
            return pickle.dumps((False, one_line(error)))

    def join(self) -> None:
        settings = self._settings
        if not settings.forms_mesh:
            return
        if settings.namespace:
            from zrpc.bench.namespaces import enter

            enter(settings.namespace)
        if settings.device:
            from zrpc.bench.device import check_device

            check_device(settings.device)
        if settings.participant in ACTOR_LIBRARIES:
            from zrpc.bench.actors import start

            self._library = start(settings.participant, settings.workers, settings.directory)
            return
        if settings.participant not in LIBRARIES:
            self._open_raw()
            return
        library = load(settings.participant)
        library.join(settings)
        self._library = library

    def _open_raw(self) -> None:
        from zrpc.bench.raw_zmq import RawPeer, start_echo

        endpoint = Path(self._settings.directory, "endpoint")
        if self._settings.rank == 1:
            ipc = f"ipc://{endpoint.parent}/raw"
            endpoint.write_text(start_echo("tcp://127.0.0.1:*" if self._settings.tcp else ipc))
        elif self._settings.rank == 0:
            self._raw = RawPeer(endpoint.read_text())

    def measure(self, workload: str, arguments: tuple[Any, ...], sampling: Sampling) -> Sample:
        module, _, name = workload.partition(":")
        function = getattr(importlib.import_module(f"zrpc.bench.{module}"), name)
        settings = self._settings
        session = Session(
            settings.participant,
            sampling,
            settings.workers,
            settings.device,
            self._library,
            self._raw,
        )
        sample: Sample = function(session, *arguments)
        return sample

    def leave(self) -> None:
        if self._library is not None:
            self._library.leave()
