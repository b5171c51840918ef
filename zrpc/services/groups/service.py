"""What a worker's groups need of its agent."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.runtime.gates import Gates
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.groups.ticket import NUMBER
from zrpc.services.shm.service import SharedMemoryService
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message


class GroupService(Service):
    """Plugs groups into an agent.

    Attributes:
        shm: has what several members of this host read.
        gates: of the threads that wait for workers to join.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.shm = agent.service(SharedMemoryService)
        self.gates = Gates()
        # Guards what follows.
        self._lock = UninterruptedLock()
        self._counts = {"group_bytes_packed": 0, "group_bytes_sent": 0}
        self._numbers = itertools.count(1)
        # The parts that calls in flight name, and the relays that have got each. The calls keep
        # them; when the last one is settled, any thread may append to the second.
        self._lent: dict[int, tuple[weakref.KeyedRef[int, Any], set[MemberId]]] = {}
        self._ended: deque[weakref.KeyedRef[int, Any]] = deque()

    def count(self, *, bytes_packed: int = 0, bytes_sent: int = 0) -> None:
        """Counts what was packed for several members, and what was sent of it."""
        with self._lock:
            self._counts["group_bytes_packed"] += bytes_packed
            self._counts["group_bytes_sent"] += bytes_sent

    def lend(self, part: Any) -> int:
        """Numbers a `Part`; members can ask for that number as long as the part lives."""
        number = next(self._numbers)
        with self._lock:
            self._lent[number] = weakref.KeyedRef(part, self._ended.append, number), set()
        return number

    def lent(self, number: int, relay: MemberId | None) -> Any:
        """Returns a part that was lent, for a worker that asks for it; None if it has ended.

        Args:
            number: the part's.
            relay: the worker, if it is to be told when the part is not needed any longer.
        """
        with self._lock:
            ref, relays = self._lent.get(number, (None, set()))
            part = None if ref is None else ref()
            if part is not None and relay is not None:
                relays.add(relay)
        return part

    @override
    def after_turn(self) -> Sequence[tuple[Sized, Callable[[], None]]]:
        return [(self._ended, self._tell_ended)]

    def _tell_ended(self) -> None:
        """Tells the relays of parts that no call needs any longer."""
        while self._ended:
            number = self._ended.popleft().key
            with self._lock:
                _, relays = self._lent.pop(number)
            for relay in relays:
                self.agent.outbox.post(relay, Message(Kind.UNNEEDED, body=NUMBER.pack(number)))

    @override
    def close(self) -> None:
        self.gates.end()

    @override
    def stats(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)
