"""A run of the soak test: one episode after another, until the time is over, and its progress."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from zrpc.bench.progress import open_bar
from zrpc.bench.soak.episode import run_episode
from zrpc.bench.soak.report import Report
from zrpc.bench.soak.schedule import Episode, schedule_episode
from zrpc.testing.startup import warm_up

# Otherwise each worker would import these itself, for seconds: the soak test, and what optimizers
# need.
_PRELOAD = ("torch._dynamo", "zrpc.bench.soak.phase")


def run(report: Report, seconds: float, show: Callable[[str], None]) -> None:
    """Runs episodes until the time is over, or one finds a violation; at least one.

    Args:
        report: contains the seed and the number of workers, and receives the results; also if
            Ctrl-C interrupts the run.
        seconds: the approximate duration.
        show: called now and then with the current step.

    Raises:
        LaunchError: no process can be started.
    """
    warm_up(processes=True, preload=_PRELOAD)
    number = 0
    while not report.tally.violations:
        seconds_left = seconds - (time.monotonic() - report.began)
        episode = schedule_episode(report.seed, number, report.workers, seconds_left)
        if number and seconds_left < episode.length:
            break
        run_episode(episode, report.workers, report, partial(_show, episode, show))
        number += 1


def _show(episode: Episode, show: Callable[[str], None], what: str) -> None:
    show(f"{'elastic ' if episode.elastic else ''}mesh {episode.name}, {episode.transport}: {what}")


@contextlib.contextmanager
def progress(report: Report, seconds: float) -> Iterator[Callable[[str], None]]:
    """Shows a bar on a terminal, otherwise a line for each step.

    Yields a function to call with each step, until the end of the block.

    Args:
        report: the report of the run, which counts its actions.
        seconds: the expected duration of the run.
    """
    with open_bar(seconds, "TimeElapsedColumn") as update:

        def show(what: str) -> None:
            taken = time.monotonic() - report.began
            if update is None:
                text = f"{taken:4.0f} s, {report.actions:,} actions: {what}"
                print(text, file=sys.stderr, flush=True)
            else:
                update(completed=taken, description=f"{report.actions:,} actions; {what}")

        yield show
