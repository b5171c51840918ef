"""The life of one mesh of a soak test: its start, shifts, deaths, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

import zrpc
from zrpc.soak import inventory, shift
from zrpc.soak.growth import Growth
from zrpc.soak.lane import Tally
from zrpc.soak.plan import Death, Life, Pause
from zrpc.soak.record import Record
from zrpc.soak.shift import Shift
from zrpc.testing import LeakError, Mesh, MeshSpec, MeshTimeout, WorkerExited
from zrpc.testing.startup import start_mesh
from zrpc.testing.watchdog import Watchdog

__all__ = ["live"]

T = TypeVar("T")

# Seconds beyond those of its shifts that a mesh may take in all: then it hangs. What is bounded
# inside has less: the end of a shift, the quiet after it, the shutdown.
_PATIENCE = 240.0
_SHUTDOWN_WITHIN = 30.0
# Within how many seconds each survivor has to be told of a death. It is one where the machine has
# time; a soak test leaves it none.
_TOLD_WITHIN = 5.0
# Of a worker's output, these lines are shown where something went wrong there.
_LINES = 30


def live(life: Life, workers: int, record: Record, tell: Callable[[str], None]) -> None:
    """Lives a life; what was done, and what went wrong, is in the record.

    Args:
        life: the plan.
        workers: how many.
        record: of the whole run.
        tell: called with what is being done, now and then.
    """
    spec = MeshSpec(
        workers,
        processes=True,
        timeout=life.length + _PATIENCE,
        options=life.options,
        restarts=len(life.deaths) > 1,
        elastic=life.elastic,
    )
    violations = record.tally.violations
    with Watchdog(spec.timeout, violations.append) as watchdog:
        try:
            with watchdog.interruptible():
                tell("a mesh starts")
                mesh = start_mesh(spec, watchdog, capture=True)
                record.counts["worker joined"] += workers
                _Mesh(life, mesh, record, tell).live()
        except (MeshTimeout, LeakError) as error:
            violations.append(str(error))
        except Exception as error:
            violations.append(f"{type(error).__name__}: {error} {error.__cause__ or ''}")


class _Mesh:
    """A mesh that has started. One thread of the run's own process drives it."""

    def __init__(self, life: Life, mesh: Mesh, record: Record, tell: Callable[[str], None]) -> None:
        self._life = life
        self._mesh = mesh
        self._record = record
        self._tell = tell
        self._living = list(range(len(mesh)))
        self._growth = Growth()
        self._number = 0
        # When the worker that may die in the present shift, or has died, is killed.
        self._death: Death | None = None
        # Those that have not done all there is once.
        self._fresh = set(self._living)
        self._directories: dict[int, str] = {}

    def live(self) -> None:
        """All of it. The mesh is shut down afterwards, by force where something went wrong."""
        well = False
        try:
            self._directories = self._all(shift.prepare)
            well = self._work_on() and self._shut_down()
        finally:
            if not well:
                self._show_outputs()
                self._mesh.shutdown(graceful=False)

    def _work_on(self) -> bool:
        """All shifts, until something goes wrong."""
        for pause in self._life.pauses:
            if not self._shift("all live", pause):
                return False
        *others, last = self._life.deaths
        for death in others:
            if not (self._lose(death) and self._restart() and self._shift("all live again")):
                return False
        if not self._lose(last):
            return False
        found = self._growth.violations()
        self._record.tally.violations += found
        self._record.growth += self._growth.bytes()
        return not found

    def _lose(self, death: Death) -> bool:
        """The shift in which a worker is killed, and the next one, without it."""
        self._death = death
        return self._shift("one dies") and self._shift("one is dead")

    def _restart(self) -> bool:
        """A shift in which the dead worker is started again, and joins those that work."""
        assert self._death is not None
        rank = self._death.rank
        well = self._shift("one comes back", restarts=True)
        self._living.append(rank)
        self._fresh.add(rank)
        self._directories[rank] = self._mesh.run(rank, shift.prepare)
        self._death = None
        self._record.counts["worker joined again"] += 1
        return well

    def _shift(self, what: str, pause: Pause | None = None, restarts: bool = False) -> bool:
        """One shift, and what there is after it; false where something is wrong."""
        total = round(self._life.length / self._life.seconds)
        self._number += 1
        self._tell(f"shift {self._number} of {total}, {what}")
        death = self._death
        dead = death is not None and death.rank not in self._living
        futures = {
            rank: self._mesh.submit(rank, shift.work, self._task(rank, dead))
            for rank in self._living
        }
        if death is not None and not dead:
            tallies = self._kill(death, futures)
        else:
            if pause is not None:
                self._pause(pause, futures)
            if restarts and death is not None:
                self._mesh.restart(death.rank)
            tallies = _results(futures)
        self._fresh -= tallies.keys()
        for tally in tallies.values():
            self._record.tally.add(tally)
        # After a violation, what is left says nothing of its own.
        return not self._record.tally.violations and self._take_inventories()

    def _task(self, rank: int, dead: bool) -> Shift:
        life, names, death = self._life, self._mesh.names, self._death
        return Shift(
            f"{life.name}.{self._number}",
            life.seconds,
            life.lanes,
            names,
            None if death is None else names[death.rank],
            dead,
            rank in self._fresh,
        )

    def _pause(self, pause: Pause, futures: dict[int, Future[Tally]]) -> None:
        """Stops a worker's process for a while: nothing may come of it."""
        wait(futures.values(), pause.after, FIRST_EXCEPTION)
        self._mesh.pause(pause.rank)
        try:
            wait(futures.values(), pause.seconds, FIRST_EXCEPTION)
        finally:
            self._mesh.resume(pause.rank)
        self._record.counts["worker stopped for a while"] += 1

    def _kill(self, death: Death, futures: dict[int, Future[Tally]]) -> dict[int, Tally]:
        """Kills the doomed worker in the midst of its shift; the survivors' results."""
        victim = death.rank
        wait(futures.values(), death.after, FIRST_EXCEPTION)
        before = time.monotonic()
        self._mesh.kill(victim)
        self._record.counts["worker killed"] += 1
        del futures[victim]
        self._living.remove(victim)
        self._growth.forget(victim)
        tallies = _results(futures)
        violations = self._record.tally.violations
        for rank, tally in tallies.items():
            name = self._mesh.names[rank]
            if any(when < before for when in [*tally.met, *tally.told]):
                violations.append(f"{name} took a worker for dead that still lived")
            for when in tally.told:
                self._record.told_in.append(when - before)
                if when - before > _TOLD_WITHIN:
                    violations.append(f"{name} was told of a death {when - before:.1f} s after it")
        return tallies

    def _take_inventories(self) -> bool:
        found = self._all(inventory.take)
        self._growth.add({rank: each for rank, each in found.items() if rank not in self._fresh})
        left = [f"{self._mesh.names[rank]}: {line}" for rank, i in found.items() for line in i.left]
        if left:
            self._record.tally.violations.append(
                "nothing was under way any more, but there were still:\n" + "\n".join(left)
            )
        return not left

    def _shut_down(self) -> bool:
        """Ends the mesh as its program would; it looks itself for what is left behind."""
        self._tell("the mesh ends")
        self._all(zrpc.shutdown, True, _SHUTDOWN_WITHIN)
        self._record.counts["worker left"] += len(self._living)
        directories = [self._directories[rank] for rank in self._living]
        left = [directory for directory in directories if os.path.lexists(directory)]
        if left:
            self._record.tally.violations.append(f"socket files were left in {left}")
        self._mesh.shutdown()
        return not left

    def _show_outputs(self) -> None:
        for name in self._mesh.names:
            lines = self._mesh.output(name).strip().splitlines()[-_LINES:]
            if lines:
                self._record.outputs[name] = "\n".join(lines)

    def _submit(self, function: Callable[..., T], *args: Any) -> dict[int, Future[T]]:
        return {rank: self._mesh.submit(rank, function, *args) for rank in self._living}

    def _all(self, function: Callable[..., T], *args: Any) -> dict[int, T]:
        """What it returns on each worker that lives."""
        return _results(self._submit(function, *args))


def _results(futures: dict[int, Future[T]]) -> dict[int, T]:
    """The results of all, or the first error. The mesh's watchdog ends the wait."""
    done: Sequence[Future[T]] = list(futures.values())
    wait(done, return_when=FIRST_EXCEPTION)
    failed = [future for future in done if future.done() and future.exception() is not None]
    # Where a process has ended, that is why the others failed.
    failed.sort(key=lambda future: not isinstance(future.exception(), WorkerExited))
    for future in failed:
        future.result()
    return {rank: future.result() for rank, future in futures.items()}
