"""``zrpc bench``: zrpc beside torch.distributed.rpc, measured on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .data_file import FILE, INTERRUPTED, check_directory, write_data
from .finite_range import POSITIVE, FiniteRange
from .soak import soak

if TYPE_CHECKING:
    from zrpc.bench.row import Group
    from zrpc.bench.settings import Settings


@click.group(
    invoke_without_command=True, short_help="Measure zrpc and torch.distributed.rpc in turn."
)
@click.option(
    "--against",
    type=click.Choice(["torch", "nothing"]),
    default="torch",
    show_default=True,
    help="The library to compare with.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How often fresh processes of both are measured in turn.",
)
@click.option(
    "--rows",
    metavar="REGEX",
    help="Measure the rows whose names match. [default: all but the starts of many workers]",
)
@click.option("--list", "only_list", is_flag=True, help="Print the names of the rows, and end.")
@click.option("--tcp", is_flag=True, help="Over loopback tcp, without faster ways.")
@click.option(
    "--seconds",
    type=FiniteRange(min=0),
    default=0.3,
    show_default=True,
    help="For how long each row is repeated in each round.",
)
@click.option(
    "--deadline",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds after which a row, or the start of processes, has failed.",
)
@click.option("--json", "data_file", type=FILE, help="Write all that was measured to this file.")
@click.option("--plot", "plot_file", type=FILE, help="Draw it to this file: png, svg or pdf.")
@click.pass_context
def command(
    ctx: click.Context,
    against: str,
    rounds: int,
    rows: str | None,
    only_list: bool,
    tcp: bool,
    seconds: float,
    deadline: float,
    data_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure zrpc and torch.distributed.rpc in turn, on this machine, in one run.

    Each round starts fresh processes of torch, of zrpc, and of neither for the limit: raw
    ZeroMQ, or memcpy for large tensors. The table shows each one's median over the rounds, and
    how many times faster zrpc is: the median, the least and the most over the rounds.

    The exit code is 0 if zrpc got through all rows, in all rounds; 1 if not, whatever the other
    library did; 130 after Ctrl-C, with a table of what was measured until then.
    """
    if ctx.invoked_subcommand is not None:
        _check_nothing_is_given(ctx, ctx.invoked_subcommand)
        return
    from zrpc.bench.effort import Effort
    from zrpc.bench.rows import all_rows, select
    from zrpc.bench.settings import Settings

    if only_list:
        click.echo("\n".join(row.name for row in all_rows()))
        return
    try:
        groups = select(rows)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rows") from error
    _check_files(data_file, plot_file)
    if plot_file is not None and against == "nothing":
        raise click.UsageError("--plot draws a comparison, but there is --against nothing")
    settings = Settings(
        against=None if against == "nothing" else against,
        rounds=rounds,
        tcp=tcp,
        effort=Effort(seconds=seconds),
        deadline=deadline,
        patience=deadline,
    )
    sys.exit(_measure(groups, settings, data_file, plot_file))


def _check_nothing_is_given(ctx: click.Context, subcommand: str) -> None:
    for param in ctx.command.params:
        source = param.name and ctx.get_parameter_source(param.name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{param.opts[0]} before `{subcommand}` has no effect there: see "
                f"`{ctx.command_path} {subcommand} --help` for its own options"
            )


def _check_files(data_file: Path | None, plot_file: Path | None) -> None:
    """Refuses, before minutes of measuring, what could not be written after them."""
    for path in (data_file, plot_file):
        check_directory(path)
    if plot_file is None:
        return
    from zrpc.bench.plot import can_plot

    if not can_plot():
        raise click.UsageError("--plot needs matplotlib: pip install 'torch-zrpc[bench]'")
    if plot_file.suffix not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--plot draws a .png, .svg or .pdf, but got {plot_file.name}")


def _measure(
    groups: list[Group], settings: Settings, data_file: Path | None, plot_file: Path | None
) -> int:
    from zrpc.bench.machine import Machine, load_average
    from zrpc.bench.plot import plot
    from zrpc.bench.progress import progress
    from zrpc.bench.run import Run
    from zrpc.bench.table import as_data, as_text, headline
    from zrpc.launch import LaunchError

    machine, before = Machine.this(), load_average()
    click.echo(headline(machine, settings))
    run, interrupted = Run(groups, settings), False
    try:
        with progress(run) as watcher:
            run.run(watcher)
    except KeyboardInterrupt:
        interrupted = True
    except LaunchError as error:
        raise click.ClickException(f"the processes to measure can't be started: {error}") from error
    after = load_average()
    click.echo(f"load average {before:.1f} before, {after:.1f} after\n\n{as_text(run)}")
    write_data(data_file, as_data(run, machine, (before, after)))
    if plot_file is not None:
        plot(run, headline(machine, settings), plot_file)
    if interrupted:
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return int(any(result.failures("zrpc") for result in run.results))


command.add_command(soak)


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in value.split(",")})
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas, but got {value!r}") from None
    if counts[0] < 2:
        raise click.BadParameter(f"a mesh to measure has at least 2 workers, but got {counts[0]}")
    return counts


@command.command()
@click.option(
    "--workers",
    default="2,4,8,16,32,64",
    show_default=True,
    callback=_counts,
    help="Sizes of the meshes, with commas.",
)
@click.option(
    "--against",
    type=click.Choice(["torch", "nothing"]),
    default="torch",
    show_default=True,
    help="The library to compare with.",
)
@click.option(
    "--deadline",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds for each mesh's start.",
)
@click.option("--json", "data_file", type=FILE, help="Write all that was measured to this file.")
@click.option("--plot", "plot_file", type=FILE, help="Draw it to this file: png, svg or pdf.")
def scale(
    workers: list[int],
    against: str,
    deadline: float,
    data_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure how cost grows with the number of workers.

    Starts meshes of growing size, and measures how long all workers take to join, how long a
    call takes that goes to each peer in turn, and what descriptors and memory worker 0 has then.
    """
    from zrpc.bench import scale as bench
    from zrpc.bench.effort import Effort
    from zrpc.bench.machine import Machine

    _check_files(data_file, plot_file)
    machine = str(Machine.this())
    click.echo(machine)
    libraries = ["zrpc"] if against == "nothing" else [against, "zrpc"]
    try:
        points = list(bench.measure(libraries, workers, Effort(), deadline, _tell))
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    click.echo(f"\n{bench.as_text(points)}")
    write_data(data_file, {"machine": machine, "points": [vars(point) for point in points]})
    if plot_file is not None:
        bench.plot(points, machine, plot_file)
    sys.exit(int(any(point.failed for point in points if point.library == "zrpc")))


def _tell(library: str, workers: int) -> None:
    click.echo(f"{workers} workers: {library}", err=True)
