"""Runs one episode of a soak test: a mesh's start, its phases and deaths, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

import zrpc
from zrpc.bench.soak import phase, resources
from zrpc.bench.soak.client import Tally
from zrpc.bench.soak.phase import Phase
from zrpc.bench.soak.report import Report
from zrpc.bench.soak.schedule import Death, Episode, Pause
from zrpc.testing import LeakError, Mesh, MeshSpec, MeshTimeout, WorkerExited
from zrpc.testing.startup import start_mesh
from zrpc.testing.watchdog import Watchdog

T = TypeVar("T")

# A mesh that takes this much longer than all of its phases hangs. Each step with a time limit of
# its own has less: the end of a phase, the idle moment after it, the shutdown.
_OVERHEAD_SECONDS = 240.0
_SHUTDOWN_SECONDS = 30.0
# The time within which each survivor must be notified of a death. It takes one second on an idle
# machine; a soak test leaves no idle time.
_NOTICE_SECONDS = 5.0
# The last lines of each worker's output that are shown if something went wrong.
_MAX_OUTPUT_LINES = 30


def run_episode(
    episode: Episode, workers: int, report: Report, show: Callable[[str], None]
) -> None:
    """Runs an episode and adds its results and violations to the report.

    Args:
        episode: the schedule of the episode.
        workers: the number of workers.
        report: the report of the whole run.
        show: called now and then with the current step.
    """
    spec = MeshSpec(
        workers,
        processes=True,
        timeout=episode.length + _OVERHEAD_SECONDS,
        options=episode.options,
        restarts=len(episode.deaths) > 1,
        elastic=episode.elastic,
    )
    violations = report.tally.violations
    with Watchdog(spec.timeout, violations.append) as watchdog:
        try:
            with watchdog.interruptible():
                show("a mesh starts")
                mesh = start_mesh(spec, watchdog, capture=True)
                report.counts["worker joined"] += workers
                _Driver(episode, mesh, report, show).run()
        except (MeshTimeout, LeakError) as error:
            violations.append(str(error))
        except Exception as error:
            violations.append(f"{type(error).__name__}: {error} {error.__cause__ or ''}")


class _Driver:
    """The driver of a mesh that has started, in one thread of the run's own process."""

    def __init__(
        self, episode: Episode, mesh: Mesh, report: Report, show: Callable[[str], None]
    ) -> None:
        self._episode = episode
        self._mesh = mesh
        self._report = report
        self._show = show
        self._living = list(range(len(mesh)))
        self._leak_check = resources.LeakCheck()
        self._number = 0
        # The death in the current phase, or of the worker that is dead.
        self._death: Death | None = None
        # The workers that have not yet performed each action once.
        self._fresh = set(self._living)
        self._directories: dict[int, str] = {}

    def run(self) -> None:
        """Runs the episode and shuts the mesh down, by force if something went wrong."""
        well = False
        try:
            self._directories = self._all(phase.prepare)
            well = self._run_phases() and self._shut_down()
        finally:
            if not well:
                self._show_outputs()
                self._mesh.shutdown(graceful=False)

    def _run_phases(self) -> bool:
        """Runs all phases, until something goes wrong."""
        for pause in self._episode.pauses:
            if not self._run_phase("all live", pause):
                return False
        *others, last = self._episode.deaths
        for death in others:
            if not (
                self._run_death(death) and self._restart() and self._run_phase("all live again")
            ):
                return False
        if not self._run_death(last):
            return False
        found = self._leak_check.violations()
        self._report.tally.violations += found
        self._report.growth += self._leak_check.bytes_grown()
        return not found

    def _run_death(self, death: Death) -> bool:
        """Runs the phase in which a worker is killed, and the next one without it."""
        self._death = death
        return self._run_phase("one dies") and self._run_phase("one is dead")

    def _restart(self) -> bool:
        """Runs a phase in which the dead worker is restarted and joins the others."""
        assert self._death is not None
        rank = self._death.rank
        well = self._run_phase("one comes back", restarts=True)
        self._living.append(rank)
        self._fresh.add(rank)
        self._directories[rank] = self._mesh.run(rank, phase.prepare)
        self._death = None
        self._report.counts["worker joined again"] += 1
        return well

    def _run_phase(self, what: str, pause: Pause | None = None, restarts: bool = False) -> bool:
        """Runs one phase and checks the resources after it; returns whether all is right."""
        total = round(self._episode.length / self._episode.seconds)
        self._number += 1
        self._show(f"phase {self._number} of {total}, {what}")
        death = self._death
        dead = death is not None and death.rank not in self._living
        futures: dict[int, Future[Tally]] = {
            rank: self._mesh.submit(rank, phase.run_phase, self._settings(rank, dead))
            for rank in self._living
        }
        if death is not None and not dead:
            tallies = self._kill(death, futures)
        else:
            if pause is not None:
                self._pause(pause, futures)
            if restarts and death is not None:
                self._mesh.restart(death.rank)
            tallies = results(futures)
        self._fresh -= tallies.keys()
        for tally in tallies.values():
            self._report.tally.add(tally)
        # After a violation, leftovers prove nothing.
        return not self._report.tally.violations and self._check_resources()

    def _settings(self, rank: int, dead: bool) -> Phase:
        episode, names, death = self._episode, self._mesh.names, self._death
        return Phase(
            f"{episode.name}.{self._number}",
            episode.seconds,
            episode.clients,
            names,
            None if death is None else names[death.rank],
            dead,
            rank in self._fresh,
        )

    def _pause(self, pause: Pause, futures: dict[int, Future[Tally]]) -> None:
        """Stops a worker's process for a while, which must have no consequences."""
        wait(futures.values(), pause.after, FIRST_EXCEPTION)
        self._mesh.pause(pause.rank)
        try:
            wait(futures.values(), pause.seconds, FIRST_EXCEPTION)
        finally:
            self._mesh.resume(pause.rank)
        self._report.counts["worker stopped for a while"] += 1

    def _kill(self, death: Death, futures: dict[int, Future[Tally]]) -> dict[int, Tally]:
        """Kills the doomed worker during the phase and returns the survivors' tallies."""
        victim = death.rank
        wait(futures.values(), death.after, FIRST_EXCEPTION)
        before = time.monotonic()
        self._mesh.kill(victim)
        self._report.counts["worker killed"] += 1
        del futures[victim]
        self._living.remove(victim)
        self._leak_check.remove(victim)
        tallies = results(futures)
        violations = self._report.tally.violations
        for rank, tally in tallies.items():
            name = self._mesh.names[rank]
            if any(when < before for when in [*tally.deaths_seen_at, *tally.notified_at]):
                violations.append(f"{name} declared a worker dead that was still alive")
            for when in tally.notified_at:
                self._report.notice_seconds.append(when - before)
                if when - before > _NOTICE_SECONDS:
                    violations.append(
                        f"{name} was notified of a death {when - before:.1f} s after it"
                    )
        return tallies

    def _check_resources(self) -> bool:
        found = self._all(resources.measure)
        self._leak_check.add(
            {rank: each for rank, each in found.items() if rank not in self._fresh}
        )
        left = [
            f"{self._mesh.names[rank]}: {line}" for rank, i in found.items() for line in i.leftovers
        ]
        if left:
            self._report.tally.violations.append(
                "no work was in progress, but there still were:\n" + "\n".join(left)
            )
        return not left

    def _shut_down(self) -> bool:
        """Shuts the mesh down as a program would. The mesh itself checks for leaks."""
        self._show("the mesh ends")
        self._all(zrpc.shutdown, True, _SHUTDOWN_SECONDS)
        self._report.counts["worker left"] += len(self._living)
        directories = [self._directories[rank] for rank in self._living]
        left = [directory for directory in directories if os.path.lexists(directory)]
        if left:
            self._report.tally.violations.append(
                f"expected no socket files after the shutdown, found them in {left}"
            )
        self._mesh.shutdown()
        return not left

    def _show_outputs(self) -> None:
        for name in self._mesh.names:
            lines = self._mesh.output(name).strip().splitlines()[-_MAX_OUTPUT_LINES:]
            if lines:
                self._report.outputs[name] = "\n".join(lines)

    def _all(self, function: Callable[..., T], *args: Any) -> dict[int, T]:
        """Returns the function's result on each worker that lives."""
        submit = self._mesh.submit
        return results({rank: submit(rank, function, *args) for rank in self._living})


def results(futures: dict[int, Future[T]]) -> dict[int, T]:
    """Returns all results, or raises the first error. The mesh's watchdog limits the wait."""
    done: Sequence[Future[T]] = list(futures.values())
    wait(done, return_when=FIRST_EXCEPTION)
    failed = [future for future in done if future.done() and future.exception() is not None]
    # If a process has exited, that is why the others failed.
    failed.sort(key=lambda future: not isinstance(future.exception(), WorkerExited))
    for future in failed:
        future.result()
    return {rank: future.result() for rank, future in futures.items()}
