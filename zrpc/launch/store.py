"""The store of a mesh that outlives its workers: hosted by a process beside them.

The launcher itself does not import torch, so the store has a process of its own. Where the
launcher adds workers to a mesh that runs already, such a process only asks that mesh's store for
ranks.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import LaunchError
from .signals import SignalInbox
from .starter import Starter
from .task import Task

__all__ = ["Place", "StoreProcess", "parse_place"]

_FIRST = struct.Struct("=q")
# Seconds: torch is to be imported first, where there is no fork server.
_READY_WITHIN = 120.0


@dataclass(frozen=True)
class Place:
    """Where the workers of a mesh meet.

    Attributes:
        host: A name or an address.
        port: 0 stands for any that is free.
    """

    host: str = "127.0.0.1"
    port: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host  # IPv6
        return f"{host}:{self.port}"


def parse_place(text: str) -> Place:
    """Read ``HOST:PORT``.

    Raises:
        ValueError: It is none.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"expected HOST:PORT, but got {text!r}")
    return Place(host, int(port))


class StoreProcess:
    """A process that hosts a store, or asks one for ranks.

    Args:
        starter: What starts it.
        env: Its environment.
        hosts: Whether it hosts the store.

    Attributes:
        pid: Its process id.
        hosts: Whether the mesh can be joined only as long as it lives.
    """

    def __init__(self, starter: Starter, env: Mapping[str, str], hosts: bool) -> None:
        self._starter = starter
        self._env = env
        self.hosts = hosts
        self.pid = 0

    def first_rank(self, place: Place, nprocs: int, inbox: SignalInbox) -> int | None:
        """Start it; return the first of so many ranks that nobody else gets.

        Args:
            place: Where the store is.
            nprocs: How many ranks.
            inbox: A signal ends the wait.

        Returns:
            None where a signal came first.

        Raises:
            LaunchError: There is no store, or none can be hosted there.
        """
        reading, writing = os.pipe()
        try:
            try:
                task = Task.function(
                    "zrpc.store_host:serve", place.host, place.port, self.hosts, nprocs, writing
                ).within(env=self._env)
                self.pid = self._starter.spawn(task, pass_fds=[writing])
            finally:
                os.close(writing)
            fds = [reading, inbox.fileno()]
            ready, _, _ = select.select(fds, [], [], _READY_WITHIN)
            if ready and reading not in ready:
                return None
            data = os.read(reading, _FIRST.size) if ready else b""
        finally:
            os.close(reading)
        if len(data) != _FIRST.size:
            text = (
                f"could not host a store for the workers at {place}: see above"
                if self.hosts
                else f"could not find the workers' store at {place}: see above. The launch that "
                "--join names must run still, and have been started with --elastic"
            )
            raise LaunchError(text)
        return int(_FIRST.unpack(data)[0])
