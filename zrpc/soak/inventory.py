"""What a worker has when nothing is under way: of zrpc's objects, threads, memory.

It looks into the parts of an agent that have no business outside of it, and is the only module
of the soak test to do so.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zrpc.autograd.layer import AutogradLayer
from zrpc.current import current_agent
from zrpc.rref.layer import RRefLayer
from zrpc.shared_memory import SharedMemoryLayer
from zrpc.soak import gradients, memory, targets
from zrpc.testing.proc import descriptors

if TYPE_CHECKING:
    from zrpc.agent import Agent

__all__ = ["Inventory", "socket_directory", "take", "under_way"]

_SETTLES_WITHIN = 20.0
_LOOK_EVERY = 0.02


@dataclass
class Inventory:
    """What a worker has, when it has nothing to do.

    Attributes:
        left: what should not be there, a line for each.
        memory: bytes that malloc has given out; 0 where the C library does not tell.
        blocks: how many Python has given out for its objects.
        resident: bytes of its own that are resident: those, what malloc can't give back because
            they lie scattered, and stacks. Memory that is shared is not counted.
        threads: how many.
        descriptors: how many, less those of segments of shared memory, which are kept for a while
            and of which there is a fixed number at most.
        objects: how many of each type of zrpc's, and tensors.
    """

    left: list[str]
    memory: int
    blocks: int
    resident: int
    threads: int
    descriptors: int
    objects: Counter[str]


def take() -> Inventory:
    """Waits until nothing is under way on this worker, and looks what there is then.

    To be called where no worker of the mesh begins anything.
    """
    targets.forget()
    gradients.forget()
    agent = current_agent()
    end = time.monotonic() + _SETTLES_WITHIN
    while (left := _left(agent)) and time.monotonic() < end:
        gc.collect()
        time.sleep(_LOOK_EVERY)  # no event tells of all of these
    gc.collect()
    return Inventory(
        left=left,
        memory=memory.in_use(),
        blocks=sys.getallocatedblocks(),
        resident=memory.resident(),
        threads=threading.active_count(),
        descriptors=sum("/memfd:zrpc-" not in target for target in descriptors().values()),
        objects=_objects(),
    )


def under_way() -> str:
    """What this worker waits for and has to do, for an account of what does not go on.

    What was sent to a worker, and what that has received from this one, are counts of messages
    since the mesh began: where they differ for long, messages are stuck or lost.
    """
    agent = current_agent()
    members = list(agent.membership.infos)
    now = time.monotonic()
    lines = _left(agent)
    lines += [
        f"call {call.call_id} to rank {call.peer} for {now - call.begun:.1f} s"
        for call in sorted(agent.caller.calls._calls.values(), key=lambda call: call.begun)
    ]
    sent = {number: agent._network.sent([number]) for number in members}
    lines.append(f"messages sent, by the number of the receiver: {sent}")
    lines.append(
        f"messages received, by the number of the sender: {dict(agent.dispatcher.received)}"
    )
    return "\n".join(lines)


def socket_directory() -> str:
    """Where this worker's Unix sockets are; empty where it has none."""
    membership = current_agent().membership
    return membership.cards[membership.rank].directory if _has_ipc() else ""


def _has_ipc() -> bool:
    membership = current_agent().membership
    return bool(membership.cards[membership.rank].ipc)


def _left(agent: Agent) -> list[str]:
    rrefs = agent.layer(RRefLayer)
    shared = agent.layer(SharedMemoryLayer)
    counts = {
        "calls without an answer": len(agent.caller.calls),
        "requests that are not answered": len(agent.callee.requests),
        "jobs of handlers": agent.pool.active,
        "jobs of completions": agent._completions.active,
        "values of RRefs": len(rrefs._values),
        "owned values and held forks": len(rrefs._references),
        "forks that wait for their owner": int(not rrefs._references.quiet),
        "accounts": targets.Account.alive,
        "autograd contexts": len(agent.layer(AutogradLayer)),
        "segments that peers have": shared.pool.lent,
        "segments of peers in use": len(shared.loans._open),
        "bytes that the window takes for under way": sum(agent.caller.window._used.values()),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def _objects() -> Counter[str]:
    """The objects that the garbage collector knows, of the types that matter."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        module = getattr(kind, "__module__", None)
        if isinstance(module, str) and module.startswith("zrpc."):
            found[f"{module}.{kind.__qualname__}"] += 1
        elif issubclass(kind, torch.Tensor):
            found["torch.Tensor"] += 1
    return found
