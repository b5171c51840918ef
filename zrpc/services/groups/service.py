"""What a worker's groups need of its agent."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.shm.service import SharedMemoryService

__all__ = ["GroupService"]


class GroupService(Service):
    """Plugs groups into an agent.

    Attributes:
        shm: has what several members of this host read.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.shm = agent.service(SharedMemoryService)
        # Guards what follows. Gates are opened without it.
        self._lock = UninterruptedLock()
        self._gates: list[threading.Lock] = []
        self._closed = False
        self._counts = {"group_bytes_packed": 0, "group_bytes_sent": 0}

    def count(self, *, bytes_packed: int = 0, bytes_sent: int = 0) -> None:
        """Counts what was packed for several members, and what was sent of it."""
        with self._lock:
            self._counts["group_bytes_packed"] += bytes_packed
            self._counts["group_bytes_sent"] += bytes_sent

    def gate(self) -> threading.Lock:
        """Returns a gate that `ring` opens, and the end of this worker."""
        gate = threading.Lock()
        with self._lock:
            if not self._closed:
                gate.acquire()
                self._gates.append(gate)
        return gate

    def ring(self, _joined: object = None) -> None:
        """Opens all gates: a worker has joined."""
        with self._lock:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()

    @override
    def close(self) -> None:
        self._closed = True
        self.ring()

    @override
    def stats(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)
