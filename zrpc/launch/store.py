"""The store of a mesh that outlives its workers, hosted by a separate process.

The launcher itself does not import torch, so the store has its own process. If the launcher adds
workers to a running mesh, this process only asks that mesh's store for ranks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from zrpc.launch.descriptors import readable
from zrpc.launch.errors import LaunchError
from zrpc.launch.signals import STOPS, SignalInbox
from zrpc.launch.starter import Starter
from zrpc.launch.task import Task

_FIRST_RANK = struct.Struct("=q")


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
    host, colon, port = str(text).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    # A URL is not of that form.
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
        raise ValueError(f"expected HOST:PORT, but got {text!r}")
    return StoreAddress(host, int(port))


def reserve_ranks(
    starter: Starter,
    env: Mapping[str, str],
    address: StoreAddress,
    nprocs: int,
    hosts: bool,
    inbox: SignalInbox,
) -> int | None:
    """Starts a process that hosts the store at an address, or else asks the one there for ranks.

    It waits for that store as long as workers do, and closes its pipe when it exits.

    Returns:
        The first of `nprocs` consecutive ranks; None if a signal to stop came before.

    Raises:
        LaunchError: There is no store at the address, or none can be hosted there.
    """
    reading, writing = os.pipe()
    with open(reading, "rb") as report:
        serve = "zrpc.membership.store_server:serve"
        task = Task.function(serve, address.host, address.port, hosts, nprocs, writing)
        try:
            starter.spawn(task.within(env=env), pass_fds=[writing])
        finally:
            os.close(writing)
        while report.fileno() not in readable(report.fileno(), inbox.fileno()):
            if inbox.has(STOPS):
                return None
        data = report.read(_FIRST_RANK.size)
    if len(data) == _FIRST_RANK.size:
        return int(_FIRST_RANK.unpack(data)[0])
    if hosts:
        raise LaunchError(f"could not host a store for the workers at {address}: see above")
    raise LaunchError(
        f"could not find the workers' store at {address}: see above. The launch that --join names "
        "must still be running, and must have been started with --elastic"
    )
