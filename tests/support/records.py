"""Peer records of workers that don't exist."""

from __future__ import annotations

from typing import Any

from zrpc.membership.peer_record import PeerRecord


def peer_record(rank: int, world_size: int = 4, *, start: int = 0, **changes: Any) -> PeerRecord:
    """Returns the record of one start of a worker; each start has a token of its own."""
    values: dict[str, Any] = {
        "name": f"worker{rank}",
        "rank": rank,
        "world_size": world_size,
        "token": f"{rank:016x}{start:016x}",
        "host_key": "host",
        "host": "node0",
        "directory": f"/run/{rank}/{start}",
        "main": "main",
    }
    return PeerRecord(**{**values, **changes})
