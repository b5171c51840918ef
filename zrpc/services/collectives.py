"""Collectives: gathering a value from each worker at all of them, which is also a barrier.

The worker whose name comes first in the alphabet collects. Each worker calls it with its value, and
when the last value has come all these calls are answered with all values. Each worker counts the
gatherings of each set of workers, so all agree on which is the n-th.

Workers may disagree for a time about who is lost. So a worker that has lost one of the others takes
no part, and tells the worker that collects, which fails the gathering for all. For the same reason,
"all workers" includes one that was declared dead and whose process may still run, unless others
have put it out.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.service import Service
from zrpc.calls.future import Future
from zrpc.constants import Seconds
from zrpc.errors import RpcError, WorkerDied
from zrpc.functions import async_execution
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

Names = frozenset[str]
# Workers by name, rank or WorkerInfo.
Workers = Iterable[str | int | WorkerInfo]

_EXPECTED = "expected the values of all workers, but {why}"


@dataclass(slots=True)
class _Gathering:
    """The values that have come so far, and the answers that wait for the rest, by worker."""

    values: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Future[dict[str, Any]]] = field(default_factory=dict)

    def fail(self, error: RpcError) -> None:
        """Answers all that wait with an error. Not in the I/O thread, since it packs answers."""
        for answer in self.answers.values():
            answer.set_exception(error)


@dataclass(slots=True)
class _Team:
    """What is known of the gatherings of one set of workers, which are numbered.

    Attributes:
        begun: how many this worker has begun.
        waiting: those that this worker waits for: several threads may gather at once.
        collected: at the worker that collects, those in progress.
        oldest: also there, the oldest number that each worker still waits for, as far as is known.
        declined: also there, the workers that take no part, and why.
        skipped: also there, the last one that failed, and the worker that had gone on without it.
    """

    begun: int = 0
    waiting: set[int] = field(default_factory=set)
    collected: dict[int, _Gathering] = field(default_factory=dict)
    oldest: dict[str, int] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    skipped: tuple[int, str] = (-1, "")

    def take_all(self) -> list[_Gathering]:
        """Takes out the gatherings in progress."""
        taken, self.collected = self.collected, {}
        return list(taken.values())

    def take_ended(self, names: Names) -> list[tuple[_Gathering, str]]:
        """Takes out the gatherings for which nothing more can come.

        Returns each with a worker whose value will never come, if there is one: it has gone on to
        a later gathering, since its value could not be sent or it timed out.
        """
        ended = []
        for number, gathering in list(self.collected.items()):
            beyond = {name for name, oldest in self.oldest.items() if oldest > number}
            for name in beyond & gathering.answers.keys():
                del gathering.answers[name]  # it has timed out, and no longer waits
            missing = names - gathering.values.keys()
            if not missing or missing & beyond or not gathering.answers:
                del self.collected[number]
                ended.append((gathering, self._ahead(number, missing & beyond)))
        return ended

    def _ahead(self, number: int, beyond: Names) -> str:
        """Returns the worker that a failed gathering is blamed on; "" if all values have come.

        A worker that comes late finds that others have gone on too, since they were told.
        """
        if beyond and self.skipped[0] != number:
            self.skipped = number, min(beyond)
        return self.skipped[1] if beyond else ""


class Collectives(Service):
    """The gatherings that a worker takes part in, and those that it collects."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # Guards what follows; no other lock is taken with it.
        self._lock = UninterruptedLock()
        self._teams: defaultdict[Names, _Team] = defaultdict(_Team)

    def gather(self, value: Any, workers: Workers | None, timeout: Seconds) -> dict[str, Any]:
        """Contributes ``value``, and waits for the values of all others.

        Returns the values by the workers' names.

        Args:
            value: anything that can be sent.
            workers: those that take part, this one included. Default: all workers in the mesh, and
                those that were declared dead.
            timeout: seconds to wait; 0 means no limit.

        Raises:
            RpcTimeoutError: the others did not contribute in time.
            WorkerDied: one of them is gone.
            RpcError: one of them has abandoned this gathering, or never was in the mesh.
            TypeError: ``workers`` is no collection.
            ValueError: this worker isn't one of ``workers``.
        """
        own = self.agent.worker_info.name
        if isinstance(workers, str) or not isinstance(workers, Iterable | None):
            raise TypeError(
                f"expected the workers that take part, this one included, got {workers!r}: write "
                f"{[workers]!r} if that is all, or leave them out for all workers of the mesh"
            )
        find = self.agent.membership.find
        if workers is None:
            names = self._all_workers()
        else:
            names = frozenset(find(each).name for each in workers)
        if own not in names:
            raise ValueError(f"expected {own}, which gathers, to be one of {sorted(names)}")
        collector = find(min(names))
        if gone := names - self._living():
            if collector.name not in gone:
                body: Any = (_decline, (names, own, f"{min(gone)} is gone, says {own}"), {})
                with contextlib.suppress(RpcError):  # the collector is lost, or its answer
                    self.agent.caller.call(collector, Kind.CALL, body, timeout)
            raise WorkerDied(_EXPECTED.format(why=f"{min(gone)} is gone"))
        with self._lock:
            team = self._teams[names]
            number, team.begun = team.begun, team.begun + 1
            team.waiting.add(number)
            oldest = min(team.waiting)
        try:
            body = (all_gather, (names, number, oldest, own, value), {})
            return self.agent.caller.call(collector, Kind.CALL, body, timeout)  # type: ignore[no-any-return]
        finally:
            with self._lock:
                team.waiting.discard(number)

    def contribute(
        self, names: Names, number: int, oldest: int, name: str, value: Any
    ) -> Future[Any]:
        """Takes a value, at the worker that collects; returns a future of all values.

        That worker waits for no gathering of these workers before the ``oldest``.
        """
        answer: Future[Any] = Future()
        ended: list[tuple[_Gathering, str]] = []
        with self._lock:
            # Under the lock, which `on_member_lost` takes after the membership has changed.
            gone = names - self._living()
            if gone:
                why = f"{min(gone)} is gone"
            else:
                team = self._teams[names]
                team.declined.pop(name, None)  # it takes part again
                why = next(iter(team.declined.values()), "")
            if not why:
                team.oldest[name] = max(oldest, team.oldest.get(name, 0))
                gathering = team.collected.setdefault(number, _Gathering())
                gathering.values[name] = value
                gathering.answers[name] = answer
                ended = team.take_ended(names)
        if why:
            answer.set_exception(WorkerDied(_EXPECTED.format(why=why)))
        for gathering, ahead in ended:
            if ahead:
                why = f"{ahead} has gone on to a later one"
                gathering.fail(RpcError(_EXPECTED.format(why=why)))
                continue
            values = dict(sorted(gathering.values.items()))
            for waiting in gathering.answers.values():
                waiting.set_result(values)
        return answer

    def decline(self, names: Names, name: str, why: str) -> None:
        """Notes, at the worker that collects, that a worker takes no part for now."""
        with self._lock:
            team = self._teams[names]
            team.declined[name] = why
            failed = team.take_all()
        for gathering in failed:
            gathering.fail(WorkerDied(_EXPECTED.format(why=why)))

    def _living(self) -> Names:
        membership = self.agent.membership
        return frozenset(membership.infos[member].name for member in membership.living)

    def _all_workers(self) -> Names:
        agent = self.agent
        lost = [m for m in list(agent.membership.lost) if agent.membership.was_found(m)]
        silent = [m for m in lost if agent.liveness.may_live(m) and not agent.peers.verdict(m)]
        return self._living().union(agent.membership.infos[member].name for member in silent)

    @override
    def on_member_lost(self, member: MemberId) -> None:
        """Fails the gatherings that a peer takes part in.

        If another worker joins under its name, all count from zero again with that one.
        """
        name = self.agent.membership.infos[member].name
        with self._lock:
            teams = [self._teams.pop(names) for names in list(self._teams) if name in names]
            failed = [gathering for team in teams for gathering in team.take_all()]
        error = WorkerDied(_EXPECTED.format(why=f"{name} is gone"))
        for gathering in failed:
            self.agent.completions.submit(partial(gathering.fail, error))

    @override
    def close(self) -> None:
        with self._lock:
            self._teams.clear()


# A call that times out is known by the function's name: so this has the one that programs use.
@async_execution
def all_gather(names: Names, number: int, oldest: int, name: str, value: Any) -> Future[Any]:
    """Adds a member's value to those of its team, at the member that collects them."""
    return current_agent().service(Collectives).contribute(names, number, oldest, name, value)


def _decline(names: Names, name: str, why: str) -> None:
    current_agent().service(Collectives).decline(names, name, why)
