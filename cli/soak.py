"""``zrpc bench soak``: random work on meshes of processes, all of it checked."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click

from .data_file import FILE, INTERRUPTED, check_directory, write_data
from .finite_range import POSITIVE


@click.command(short_help="Have workers do random things, all of it checked.")
@click.option(
    "--minutes",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="For how long. One mesh at least lives its whole life.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Of all random numbers. [default: random]")
@click.option(
    "--workers",
    type=click.IntRange(min=3),
    default=6,
    show_default=True,
    help="How many processes a mesh has.",
)
@click.option(
    "--json",
    "data_file",
    type=FILE,
    help="Write what was done and found to this file.",
)
def soak(minutes: float, seed: int | None, workers: int, data_file: Path | None) -> None:
    """Have workers do all kinds of random things, kill some, and check every result.

    Each mesh of processes calls, fails, sends tensors, makes RRefs and passes them on, goes
    backward and steps optimizers; a worker is stopped for a while now and then, and some are
    killed, and started again. Whenever nothing is under way, nothing may be left of it: no memory,
    no thread, descriptor, RRef, context, segment, process or socket file.

    The exit code is 0 if all was right; 1 if not, with an account of what was wrong; 130 after
    Ctrl-C. The same seed does the same again, as far as the scheduling of threads permits.
    """
    check_directory(data_file)
    from zrpc.launch import LaunchError
    from zrpc.soak.progress import progress
    from zrpc.soak.record import Record
    from zrpc.soak.run import run

    record = Record(secrets.randbelow(10**6) if seed is None else seed, workers)
    click.echo(f"seed {record.seed}, {workers} workers, {minutes:g} min")
    interrupted = False
    try:
        with progress(record, 60 * minutes) as tell:
            run(record, 60 * minutes, tell)
    except KeyboardInterrupt:
        interrupted = True
    except LaunchError as error:
        raise click.ClickException(f"the workers can't be started: {error}") from error
    click.echo(record.as_text())
    write_data(data_file, record.as_data())
    if interrupted:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(int(bool(record.tally.violations)))
