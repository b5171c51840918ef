"""What a worker counts and knows, as it shows it."""

from __future__ import annotations

import gc
from typing import TypeVar

import zrpc
from zrpc.agent.current import current_agent
from zrpc.agent.stats import PeerStats, Stats
from zrpc.services.inspection.service import InspectionService
from zrpc.testing import Mesh
from zrpc.wire.member_id import MemberId

T = TypeVar("T")


def living(kind: type[T]) -> list[T]:
    """Returns the objects of exactly this class that are not freed, of all workers here."""
    return [each for each in gc.get_objects() if type(each) is kind]


def stats_of(mesh: Mesh, rank: int = 0) -> Stats:
    with mesh.agent(rank).as_current():
        return zrpc.stats()


def deferred(mesh: Mesh, rank: int = 1) -> int:
    """How many requests wait for an outcome that comes later, such as an item of a queue."""
    return sum(each.scope.deferred for each in mesh.agent(rank).callee.requests.all())


def busy(mesh: Mesh, rank: int = 1) -> int:
    """Returns how many calls a worker has not answered."""
    return stats_of(mesh, rank).requests_in_progress


def calls_to(mesh: Mesh, peer: int, rank: int = 0) -> PeerStats:
    """Returns the traffic of a worker with a peer that it has called."""
    return stats_of(mesh, rank).peers[f"worker{peer}"]


def ask_often(mesh: Mesh, seconds: float = 0.05) -> None:
    """Lets all workers ask their callees soon, and often, about calls that wait."""
    for name in mesh:
        mesh.agent(name).service(InspectionService).rules.seconds = seconds


def answers_heartbeats(peer: int) -> bool:
    """Returns whether a peer of this worker answers its heartbeats."""
    return current_agent().liveness.silence(MemberId(peer)) == 0.0
