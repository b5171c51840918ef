"""``zrpc bench soak``: random work on meshes of processes, with every result checked."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click

from . import bench_options
from .options import POSITIVE


@click.command(short_help="Run random work on meshes and check every result.")
@click.option(
    "--minutes",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Minutes to run. At least one mesh is run to its end.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Seed of random numbers. [default: random]"
)
@click.option(
    "--workers",
    type=click.IntRange(min=3),
    default=6,
    show_default=True,
    help="Number of processes in a mesh.",
)
@bench_options.file(
    "--json", "data_file", "Write the work done and the problems found to this file, as JSON."
)
def soak(minutes: float, seed: int | None, workers: int, data_file: Path | None) -> None:
    """Run random work of all kinds on meshes, kill some workers, and check every result.

    The worker processes of each mesh call each other, raise errors, send tensors, create RRefs and
    pass them on, run backward passes and step optimizers. Workers are sometimes paused, and some
    are killed and started again. Whenever no work is in progress, nothing of it may be left: no
    memory, thread, descriptor, RRef, context, segment, process or socket file.

    The exit code is 0 if no problem was found; 1 if one was, with a report; 130 after Ctrl-C.
    The same seed repeats the same work, as far as the scheduling of threads permits.
    """
    from zrpc.bench.soak.report import Report
    from zrpc.bench.soak.run import progress, run
    from zrpc.launch import LaunchError

    report = Report(secrets.randbelow(10**6) if seed is None else seed, workers)
    click.echo(f"seed {report.seed}, {workers} workers, {minutes:g} min")
    interrupted = False
    try:
        with progress(report, 60 * minutes) as show:
            run(report, 60 * minutes, show)
    except KeyboardInterrupt:
        interrupted = True
    except LaunchError as error:
        raise click.ClickException(f"could not start the workers: {error}") from error
    click.echo(report.as_text())
    bench_options.write_data(data_file, report.as_data())
    if interrupted:
        bench_options.exit_interrupted()
    sys.exit(int(bool(report.tally.violations)))
