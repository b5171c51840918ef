"""The store of a mesh that outlives its workers, hosted by a separate process.

The launcher itself does not import torch, so the store has its own process. If the launcher adds
workers to a running mesh, this process only asks that mesh's store for ranks.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from zrpc.launch.errors import LaunchError
from zrpc.launch.signals import STOPS, SignalInbox
from zrpc.launch.starter import Starter
from zrpc.launch.task import Task

__all__ = ["StoreAddress", "StoreProcess", "parse_address"]

_FIRST_RANK = struct.Struct("=q")
# How long the process may take besides its wait for the store, for which this variable is its
# limit. If it isn't forked, it imports torch first.
_READY_SECONDS = 120.0
_INIT_TIMEOUT = "ZRPC_INIT_TIMEOUT"
_LONGEST_SECONDS = 1e6  # `select` takes not much more


@dataclass(frozen=True)
class StoreAddress:
    """The address where the workers of a mesh meet: a host name or IP address, and a TCP port."""

    host: str = "127.0.0.1"
    port: int = 0  # stands for any free one

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host  # IPv6
        return f"{host}:{self.port}"


def parse_address(text: str) -> StoreAddress:
    """Parses ``HOST:PORT``.

    Raises:
        ValueError: `text` is not of that form.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"expected HOST:PORT, but got {text!r}")
    return StoreAddress(host, int(port))


class StoreProcess:
    """A process that hosts a store, or asks one for ranks.

    Attributes:
        pid: The process id.
        hosts: Whether the process hosts the store. If so, the mesh can be joined only while it
            runs.
    """

    def __init__(self, starter: Starter, env: Mapping[str, str], hosts: bool) -> None:
        self._starter = starter
        self._env = env
        self.hosts = hosts
        self.pid = 0

    def first_rank(self, address: StoreAddress, nprocs: int, inbox: SignalInbox) -> int | None:
        """Starts the process, which reserves `nprocs` consecutive ranks; returns the first of them.

        Returns None if a signal in the inbox came before it.

        Raises:
            LaunchError: There is no store at the address, or none can be hosted there.
        """
        reading, writing = os.pipe()
        try:
            try:
                task = Task.function(
                    "zrpc.membership.store_server:serve",
                    address.host,
                    address.port,
                    self.hosts,
                    nprocs,
                    writing,
                ).within(env=self._env)
                self.pid = self._starter.spawn(task, pass_fds=[writing])
            finally:
                os.close(writing)
            ready = self._wait(reading, inbox)
            if inbox.has(STOPS):
                return None
            data = os.read(reading, _FIRST_RANK.size) if ready else b""
        finally:
            os.close(reading)
        if len(data) != _FIRST_RANK.size:
            text = (
                f"could not host a store for the workers at {address}: see above"
                if self.hosts
                else f"could not find the workers' store at {address}: see above. The launch that "
                "--join names must still be running, and must have been started with --elastic"
            )
            raise LaunchError(text)
        return int(_FIRST_RANK.unpack(data)[0])

    def _wait(self, reading: int, inbox: SignalInbox) -> bool:
        """Waits until the descriptor is readable, a signal to stop has come, or time is up.

        Returns whether the descriptor is readable.
        """
        seconds = _READY_SECONDS + self._init_seconds()
        deadline = time.monotonic() + seconds
        while True:
            ready, _, _ = select.select([reading, inbox.fileno()], [], [], seconds)
            if not ready or reading in ready or inbox.has(STOPS):
                return reading in ready
            seconds = max(0.0, deadline - time.monotonic())

    def _init_seconds(self) -> float:
        try:
            seconds = float(self._env.get(_INIT_TIMEOUT, "") or 0)
        except ValueError:
            return 0.0  # the process reports that
        return min(seconds, _LONGEST_SECONDS) if seconds > 0 else 0.0
