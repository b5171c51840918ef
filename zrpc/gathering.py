"""Gathering a value of each worker at all of them, which is also a barrier.

The worker whose name is the first by the alphabet collects: each worker calls it with what it has
to give, and all these calls are answered, with all values, when the last of them has come. The n-th
gathering of one set of workers is the same at each of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from zrpc.agent import Agent
from zrpc.current import current_agent
from zrpc.errors import RpcError, WorkerDied
from zrpc.functions import async_execution
from zrpc.futures import Future
from zrpc.wire.kind import Kind

__all__ = ["GatheringLayer", "plug_in"]

Names = frozenset[str]

_EXPECTED = "expected the values of all workers, but {why}"


class _Gathering:
    """What has come so far, by who gave it, and the answers that wait for the rest."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.answers: dict[str, Future[dict[str, Any]]] = {}

    def succeed(self) -> None:
        """Gives all values to those that wait."""
        values = dict(sorted(self.values.items()))
        for answer in self.answers.values():
            answer.set_result(values)

    def fail(self, error: RpcError) -> None:
        """Tells those that wait. Not in the I/O thread, since it packs answers."""
        for answer in self.answers.values():
            answer.set_exception(error)


class GatheringLayer:
    """The gatherings that a worker takes part in, and those that it collects.

    Args:
        agent: the worker's.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        # Guards what follows; no other lock is taken with it.
        self._lock = threading.Lock()
        self._begun: Counter[Names] = Counter()
        # At the worker that collects: what is under way, by who takes part and its number, and to
        # which number each worker has come.
        self._collected: dict[tuple[Names, int], _Gathering] = {}
        self._latest: dict[Names, dict[str, int]] = {}

    def gather(self, value: Any, workers: Iterable[str] | None, timeout: float) -> dict[str, Any]:
        """Gives ``value``, and waits for those of all others.

        Args:
            value: anything that can be sent.
            workers: the names of those that take part, this one among them. Default: all that are
                in the mesh.
            timeout: of the wait, in seconds; 0 for none.

        Returns:
            The values by the workers' names.

        Raises:
            RpcTimeoutError: the others did not come in time.
            WorkerDied: one of them is gone.
            RpcError: one of them has given this gathering up, or was never there.
            ValueError: this worker isn't one of ``workers``.
        """
        own = self.agent.worker_info.name
        names = self._living() if workers is None else frozenset(workers)
        if own not in names:
            raise ValueError(f"expected {own}, which gathers, to be one of {sorted(names)}")
        for name in sorted(names):
            self.agent.membership.find(name)
        if gone := names - self._living():
            raise WorkerDied(_EXPECTED.format(why=f"{min(gone)} is gone"))
        with self._lock:
            number = self._begun[names]
            self._begun[names] += 1
        body: Any = (_contribute, (names, number, own, value), {})
        collector = self.agent.membership.find(min(names))
        return self.agent.caller.call(collector, Kind.CALL, body, timeout)  # type: ignore[no-any-return]

    def contribute(self, names: Names, number: int, name: str, value: Any) -> Future[Any]:
        """At the worker that collects: takes a value; the future is of all of them."""
        answer: Future[Any] = Future()
        ended: list[tuple[_Gathering, Names]] = []
        with self._lock:
            # Looked at under the lock, which `lose` takes after the membership has changed.
            gone = names - self._living()
            if not gone:
                self._latest.setdefault(names, {})[name] = number
                gathering = self._collected.setdefault((names, number), _Gathering())
                gathering.values[name] = value
                gathering.answers[name] = answer
                ended = self._take_ended(names)
        if gone:
            answer.set_exception(WorkerDied(_EXPECTED.format(why=f"{min(gone)} is gone")))
        for gathering, ahead in ended:
            if ahead:
                why = f"{min(ahead)} has gone on to a later one"
                gathering.fail(RpcError(_EXPECTED.format(why=why)))
            else:
                gathering.succeed()
        return answer

    def _take_ended(self, names: Names) -> list[tuple[_Gathering, Names]]:
        """Takes out the gatherings of these workers for which nothing more can come.

        Returns:
            Each with the workers whose values will never come: they have gone on to a later one,
            as this one's value could not be sent, or they were late.
        """
        latest = self._latest[names]
        ended = []
        for key in [key for key in self._collected if key[0] == names]:
            gathering = self._collected[key]
            beyond = {name for name, number in latest.items() if number > key[1]}
            for name in beyond & gathering.answers.keys():
                del gathering.answers[name]  # it has timed out, and waits no more
            missing = names - gathering.values.keys()
            if not missing or missing & beyond or not gathering.answers:
                del self._collected[key]
                ended.append((gathering, missing & beyond))
        return ended

    def _living(self) -> Names:
        membership = self.agent.membership
        return frozenset(membership.infos[number].name for number in membership.living)

    def lose(self, rank: int) -> None:
        """A peer is gone, and with it what it takes part in.

        Should another one come under its name, all begin to count anew with it.
        """
        name = self.agent.membership.infos[rank].name
        with self._lock:
            keys = [key for key in self._collected if name in key[0]]
            failed = [self._collected.pop(key) for key in keys]
            for counts in (self._begun, self._latest):
                for names in [names for names in counts if name in names]:
                    del counts[names]
        error = WorkerDied(_EXPECTED.format(why=f"{name} is gone"))
        for gathering in failed:
            self.agent.submit(partial(gathering.fail, error))

    def quiet(self) -> bool:
        """Gatherings are calls, which are under way as others are."""
        return True

    def close(self) -> None:
        """Forgets what it has collected; the callers are told that this worker is gone."""
        with self._lock:
            self._collected.clear()


def plug_in(agent: Agent) -> GatheringLayer:
    """Plugs gatherings into an agent, see `join_mesh`."""
    return GatheringLayer(agent)


@async_execution
def _contribute(names: Names, number: int, name: str, value: Any) -> Future[Any]:
    return current_agent().layer(GatheringLayer).contribute(names, number, name, value)
