"""Workloads: what a worker costs in a mesh of many."""

from __future__ import annotations

import itertools
import os

from zrpc.bench import targets
from zrpc.bench.effort import Sample
from zrpc.bench.session import Session

__all__ = ["call", "descriptors", "private_memory"]


def call(session: Session) -> Sample:
    """An empty call to each peer in turn."""
    rpc_sync = session.rpc.rpc_sync
    peers = [f"worker{rank}" for rank in range(1, session.workers)]
    for peer in peers:
        rpc_sync(peer, targets.nothing)  # connects
    turn = itertools.cycle(peers)
    return session.effort.time(lambda: rpc_sync(next(turn), targets.nothing))


def descriptors(session: Session) -> Sample:
    """How many descriptors worker 0 has open."""
    count = len(os.listdir("/proc/self/fd"))
    return Sample(count, count, 1)


def private_memory(session: Session) -> Sample:
    """The memory that worker 0 shares with no other process, in bytes."""
    size = 0
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                size += int(line.split()[1]) * 1024
    return Sample(size, size, 1)
