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


class _ViolationFound(Exception):
    """The episode can't go on; the report already has the reason."""


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
        except _ViolationFound:
            pass
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
        try:
            self._directories = self._all(phase.prepare)
            self._run_phases()
            self._shut_down()
        except BaseException:
            self._show_outputs()
            self._mesh.shutdown(graceful=False)
            raise

    def _run_phases(self) -> None:
        for pause in self._episode.pauses:
            self._run_phase("all live", pause)
        *others, last = self._episode.deaths
        for death in others:
            self._run_death(death)
            self._restart(death.rank)
            self._run_phase("all live again")
        self._run_death(last)
        self._report.growth += self._leak_check.bytes_grown()
        self._report_violations(self._leak_check.violations())

    def _report_violations(self, found: Sequence[str] = ()) -> None:
        """Adds what was found to the report; raises if this has any violation."""
        self._report.tally.violations += found
        if self._report.tally.violations:
            raise _ViolationFound

    def _run_death(self, death: Death) -> None:
        """Runs the phase in which a worker is killed, and the next one without it."""
        self._death = death
        self._run_phase("one dies")
        self._run_phase("one is dead")

    def _restart(self, rank: int) -> None:
        """Runs a phase in which the dead worker is restarted and joins the others."""
        self._run_phase("one comes back", restarts=True)
        self._living.append(rank)
        self._fresh.add(rank)
        self._directories[rank] = self._mesh.run(rank, phase.prepare)
        self._death = None
        self._report.counts["worker joined again"] += 1

    def _run_phase(self, what: str, pause: Pause | None = None, restarts: bool = False) -> None:
        """Runs one phase and checks the resources after it."""
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
        self._report_violations()  # after one, leftovers would prove nothing
        self._check_resources()

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
            for taken in [when - before for when in tally.notified_at]:
                self._report.notice_seconds.append(taken)
                if taken > _NOTICE_SECONDS:
                    violations.append(f"{name} was notified of a death {taken:.1f} s after it")
        return tallies

    def _check_resources(self) -> None:
        left = []
        for rank, each in self._all(resources.measure).items():
            left += [f"{self._mesh.names[rank]}: {line}" for line in each.leftovers]
            if rank not in self._fresh:
                self._leak_check.add(rank, each)
        if left:
            text = "\n".join(["no work was in progress, but there still were:", *left])
            self._report_violations([text])

    def _shut_down(self) -> None:
        """Shuts the mesh down as a program would. The mesh itself checks for leaks."""
        self._show("the mesh ends")
        self._all(zrpc.shutdown, True, _SHUTDOWN_SECONDS)
        self._report.counts["worker left"] += len(self._living)
        directories = [self._directories[rank] for rank in self._living]
        left = [directory for directory in directories if os.path.lexists(directory)]
        self._mesh.shutdown()
        if left:
            text = f"expected no socket files after the shutdown, found them in {left}"
            self._report_violations([text])

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
