"""The resources of a worker when no work is in progress, and how much they grow between them.

This is the only module of the soak test that reads private attributes of the agent.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrpc.agent.current import current_agent
from zrpc.bench.machine import read_kib
from zrpc.bench.soak import gradients, targets
from zrpc.runtime.allocator import give_back_freed_memory
from zrpc.services.autograd.service import AutogradService
from zrpc.services.rref.service import RRefService
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing.procfs import descriptors

if TYPE_CHECKING:
    from zrpc.agent.agent import Agent

_SETTLE_SECONDS = 20.0
_POLL_SECONDS = 0.02
_USED, _RESIDENT = "bytes in use by malloc", "resident bytes"
# How much a worker may grow after its first phase. That phase has not yet filled everything: the
# caches of torch and Python, one socket for each peer, 4096 ids of contexts that have ended. With
# these bounds a leak of 1 KB per action is found in a minute, and one of 20 bytes in an hour.
_MAX_GROWTH = {
    _USED: 6 << 20,
    "blocks in use by Python": 30_000,
    # This includes memory that malloc can't give back, which is no leak: it grows for some minutes,
    # in each thread's arena. How far depends on the sizes of tensors, so this bound is wide.
    _RESIDENT: 256 << 20,
    "threads": 40,
    "descriptors": 40,
}
_MAX_OBJECTS = 100  # more of each type


@dataclass
class Resources:
    """The resources of a worker that has no work.

    Attributes:
        leftovers: one line for each kind of object that should be gone.
        amounts: how much it has of each resource in `_MAX_GROWTH`, and of the objects of each type.
    """

    leftovers: list[str]
    amounts: dict[str, int]


def measure() -> Resources:
    """Waits until no work is in progress on this worker, then measures its resources.

    Must be called when no worker of the mesh starts any work.
    """
    targets.forget()
    gradients.forget()
    agent = current_agent()
    end = time.monotonic() + _SETTLE_SECONDS
    while (left := _left(agent)) and time.monotonic() < end:
        gc.collect()
        time.sleep(_POLL_SECONDS)  # there is no event for all of these
    gc.collect()
    amounts = {
        _USED: _memory_in_use(),
        "blocks in use by Python": sys.getallocatedblocks(),
        _RESIDENT: _resident(),
        "threads": threading.active_count(),
        # Without segments of shared memory: they are kept for a while, and their number is bounded.
        "descriptors": sum("/memfd:zrpc-" not in target for target in descriptors().values()),
        **{f"objects of {kind}": count for kind, count in _objects().items()},
    }
    return Resources(left, amounts)


def outstanding_work() -> str:
    """Describes what this worker waits for and has to do, to explain why it is stuck.

    The messages sent to a worker, and those that it has received from this one, are counted since
    the mesh started. If the counts stay different, messages are stuck or lost.
    """
    agent = current_agent()
    members = list(agent.membership.infos)
    now = time.monotonic()
    lines = _left(agent)
    lines += [
        f"call {call.call_id} to rank {call.peer} for {now - call.begun:.1f} s"
        for call in sorted(agent.caller.calls.in_flight(), key=lambda call: call.begun)
    ]
    sent = {number: agent.network.sent([number]) for number in members}
    received = dict(agent.dispatcher.received)
    lines.append(f"messages sent, by the number of the receiver: {sent}")
    lines.append(f"messages received, by the number of the sender: {received}")
    return "\n".join(lines)


def socket_directory() -> str:
    """Returns the directory of this worker's Unix sockets; empty if it has none."""
    membership = current_agent().membership
    own = membership.records[membership.own_id]
    return own.directory if own.ipc else ""


def _left(agent: Agent) -> list[str]:
    rrefs = agent.service(RRefService)
    shared = agent.service(SharedMemoryService)
    counts = {
        "calls without an answer": len(agent.caller.calls),
        "requests that are not answered": len(agent.callee.requests),
        "jobs of handlers": agent.pool.active,
        "jobs of completions": agent.completions.active,
        "values of RRefs": len(rrefs.values),
        "owned values and held forks": sum(rrefs.references.sizes()),
        "forks that wait for their owner": int(not rrefs.references.idle),
        "accounts": targets.Account.alive,
        "autograd contexts": len(agent.service(AutogradService)),
        "segments that peers have": shared.pool.lent,
        "segments of peers in use": len(shared.loans.open),
        "bytes that flow control counts as in flight": sum(
            load.used for loads in agent.caller.calls.loads().values() for load in loads
        ),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def _objects() -> Counter[str]:
    """Counts the objects known to the garbage collector, by type: zrpc's types and tensors."""
    found: Counter[str] = Counter()
    for kind in map(type, gc.get_objects()):
        module = getattr(kind, "__module__", None)
        if isinstance(module, str) and module.startswith("zrpc."):
            found[f"{module}.{kind.__qualname__}"] += 1
        elif issubclass(kind, torch.Tensor):
            found["torch.Tensor"] += 1
    return found


class _Mallinfo(ctypes.Structure):
    """The result of glibc's ``mallinfo2``: sums over all arenas."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _memory_in_use() -> int:
    """Returns the bytes that malloc has given out; 0 if the C library can't report them."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _resident() -> int:
    """Returns the resident bytes of this process alone, after malloc has freed what it can.

    Those are malloc's, also what it can't give back because it is fragmented, and stacks. Shared
    memory is not counted.
    """
    give_back_freed_memory()
    return read_kib("/proc/self/status", "RssAnon")


class LeakCheck:
    """The first and last resources of each worker, by rank, and their differences."""

    def __init__(self) -> None:
        self._first: dict[int, dict[str, int]] = {}
        self._last: dict[int, dict[str, int]] = {}

    def add(self, rank: int, found: Resources) -> None:
        """Adds the resources of a worker in one idle moment."""
        self._last[rank] = found.amounts
        self._first.setdefault(rank, found.amounts)

    def remove(self, rank: int) -> None:
        """Removes a worker that is dead."""
        self._first.pop(rank, None)
        self._last.pop(rank, None)

    def bytes_grown(self) -> list[tuple[int, int]]:
        """Returns for each worker the growth of its bytes in use, and of its resident bytes."""
        return [
            (last[_USED] - self._first[rank][_USED], last[_RESIDENT] - self._first[rank][_RESIDENT])
            for rank, last in self._last.items()
        ]

    def violations(self) -> list[str]:
        """Returns one line for each resource that has grown too much."""
        return [
            f"rank {rank} has grown from its first idle moment to its last: {line}"
            for rank, last in self._last.items()
            for line in _excess_growth(self._first[rank], last)
        ]


def _excess_growth(first: Mapping[str, int], last: Mapping[str, int]) -> list[str]:
    lines = []
    for what, now in last.items():
        before, bound = first.get(what, 0), _MAX_GROWTH.get(what, _MAX_OBJECTS)
        if now - before > bound:
            lines.append(f"{now} {what}, {before} before; expected at most {bound} more")
    return lines
