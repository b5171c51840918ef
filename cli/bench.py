"""``zrpc bench``: measures zrpc and torch.distributed.rpc on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import bench_options
from .link import link
from .soak import soak

if TYPE_CHECKING:
    from zrpc.bench.row import Group
    from zrpc.bench.run import Settings


def _against(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--against",
        type=click.Choice([*names, "nothing"]),
        default="torch",
        show_default=True,
        help="The library to compare with.",
    )


def _drawable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuses, before minutes of measuring, a plot that could not be drawn afterwards."""
    if path is not None:
        from zrpc.bench.plot import can_plot

        if not can_plot():
            raise click.UsageError("--plot needs matplotlib: pip install matplotlib")
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise click.UsageError(f"--plot draws a .png, .svg or .pdf, but got {path.name}")
    return path


_PLOT = bench_options.file(
    "--plot", "plot_file", "Draw the results to this png, svg or pdf file.", _drawable
)


@click.group(
    invoke_without_command=True, short_help="Compare the speed of zrpc and torch.distributed.rpc."
)
@_against("torch", "ray", "monarch", "rpyc")
@bench_options.rounds(5, "fresh processes of both libraries")
@click.option(
    "--rows",
    metavar="REGEX",
    multiple=True,
    help="Measure only rows with matching names; can be repeated. "
    "[default: all but the starts of many workers, the skeletons, the steps and the floors]",
)
@click.option("--list", "only_list", is_flag=True, help="Print the names of the rows and exit.")
@click.option(
    "--device",
    default="",
    metavar="DEVICE",
    help="Measure the rows of tensors with tensors on this device, such as cuda, by device maps.",
)
@click.option("--tcp", is_flag=True, help="Measure over loopback TCP, without faster transports.")
@bench_options.seconds(0.3, "row")
@bench_options.deadline("after which a row, or the start of processes, counts as failed")
@bench_options.JSON
@_PLOT
@click.pass_context
def command(
    ctx: click.Context,
    against: str,
    rounds: int,
    rows: tuple[str, ...],
    only_list: bool,
    device: str,
    tcp: bool,
    seconds: float,
    deadline: float,
    data_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Compare the speed of zrpc and torch.distributed.rpc on this machine, in one run.

    Or that of zrpc and the actors of Ray or Monarch, or RPyC, in the rows that these can do.

    Each round starts fresh processes for either library, and for the lower limit: raw ZeroMQ, or
    memcpy for large tensors; with --device, copies within the device. The table shows the median of
    each over the rounds, and how many times faster zrpc is: the median, minimum and maximum over
    the rounds.

    The exit code is 0 if zrpc completed all rows in all rounds; 1 if not, whatever the other
    library did; 130 after Ctrl-C, with a table of the results until then.
    """
    if ctx.invoked_subcommand is not None:
        _check_no_options(ctx, ctx.invoked_subcommand)
        return
    from zrpc.bench.library import ACTOR_LIBRARIES
    from zrpc.bench.rows import all_rows, select
    from zrpc.bench.run import Settings
    from zrpc.bench.session import Sampling

    if only_list:
        click.echo("\n".join(row.name for row in all_rows()))
        return
    try:
        groups = select(rows, against, device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rows") from error
    if against in ACTOR_LIBRARIES:
        _check_actors(against, tcp)
    device = _usable_device(device, against, tcp) if device else ""
    if plot_file is not None and against == "nothing":
        raise click.UsageError("--plot draws a comparison: remove --against nothing")
    settings = Settings(
        against=None if against == "nothing" else against,
        rounds=rounds,
        tcp=tcp,
        device=device,
        sampling=Sampling(seconds=seconds),
        deadline=deadline,
        mesh_timeout=deadline,
    )
    sys.exit(_measure(groups, settings, data_file, plot_file))


def _check_no_options(ctx: click.Context, subcommand: str) -> None:
    for param in ctx.command.params:
        source = param.name and ctx.get_parameter_source(param.name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{param.opts[0]} before `{subcommand}` has no effect on it: see "
                f"`{ctx.command_path} {subcommand} --help` for its own options"
            )


def _check_actors(against: str, tcp: bool) -> None:
    from zrpc.bench.library import ACTOR_LIBRARIES

    if find_spec(against) is None:
        raise click.UsageError(
            f"--against {against} needs {against}: pip install '{ACTOR_LIBRARIES[against]}'"
        )
    if tcp:
        raise click.UsageError(f"--tcp compares with torch: {against} has no such option")


def _usable_device(device: str, against: str, tcp: bool) -> str:
    """Returns the device with its index; refuses one that can't be measured here."""
    from zrpc.bench.device import check_device
    from zrpc.bench.library import ACTOR_LIBRARIES

    if tcp or against in ACTOR_LIBRARIES:
        what = "--tcp" if tcp else f"--against {against}"
        raise click.UsageError(f"--device compares with torch's own transports: remove {what}")
    try:
        return check_device(device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error


def _measure(
    groups: list[Group], settings: Settings, data_file: Path | None, plot_file: Path | None
) -> int:
    from zrpc.bench.machine import Machine
    from zrpc.bench.plot import plot
    from zrpc.bench.progress import progress
    from zrpc.bench.run import Run
    from zrpc.bench.table import as_data, as_text, headline
    from zrpc.launch import LaunchError

    machine, before = Machine.this(), os.getloadavg()[0]
    click.echo(headline(machine, settings))
    run, interrupted = Run(groups, settings), False
    try:
        with progress(run) as show:
            run.run(show)
    except KeyboardInterrupt:
        interrupted = True
    except LaunchError as error:
        raise click.ClickException(f"could not start the processes to measure: {error}") from error
    after = os.getloadavg()[0]
    click.echo(f"load average {before:.1f} before, {after:.1f} after\n\n{as_text(run)}")
    bench_options.write_data(data_file, as_data(run, machine, (before, after)))
    if plot_file is not None:
        plot(run, headline(machine, settings), plot_file)
    if interrupted:
        bench_options.exit_interrupted()
    return int(any(result.failures("zrpc") for result in run.results))


command.add_command(soak)
command.add_command(link)


def _counts(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
    if value is None:
        return []
    try:
        counts = sorted({int(part) for part in value.split(",")})
    except ValueError:
        raise click.BadParameter(
            f"expected numbers separated by commas, but got {value!r}"
        ) from None
    if counts[0] < 2:
        raise click.BadParameter(f"expected meshes of at least 2 workers, but got {counts[0]}")
    return counts


@command.command()
@click.option(
    "--workers",
    default="2,4,8,16,32,64",
    show_default=True,
    callback=_counts,
    help="Sizes of the meshes, separated by commas.",
)
@click.option(
    "--compute",
    metavar="WORKERS",
    callback=_counts,
    help="Also compute the costs of meshes of these sizes from those measured.",
)
@click.option("--keys", is_flag=True, help="Connect by loopback TCP with encryption, as hosts do.")
@_against("torch")
@bench_options.deadline("in which each mesh must start")
@bench_options.JSON
@_PLOT
def scale(
    workers: list[int],
    compute: list[int],
    keys: bool,
    against: str,
    deadline: float,
    data_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure how costs grow with the number of workers.

    Starts meshes of increasing size. Measures how long all workers take to join, how long a call
    takes to one peer again and again and to each peer in turn, and how many descriptors and threads
    and how much memory worker 0 then uses. Then all others push a tensor of 1 MiB to worker 0 and
    get one back, as the clients of a parameter server, and each worker sends one to each other
    worker.

    The exit code is 0 if zrpc started and measured all meshes, 1 if not, and 130 after Ctrl-C.
    """
    from zrpc.bench import scale as bench
    from zrpc.bench.machine import Machine
    from zrpc.bench.session import Sampling

    machine = str(Machine.this())
    click.echo(machine)
    libraries = ["zrpc"] if against == "nothing" else [against, "zrpc"]

    def show_step(library: str, workers: int) -> None:
        click.echo(f"{workers} workers: {library}", err=True)

    try:
        measured = bench.measure(libraries, workers, Sampling(), deadline, show_step, keys=keys)
        points = list(measured)
    except KeyboardInterrupt:
        bench_options.exit_interrupted()
    points += bench.compute(points, compute)
    click.echo(f"\n{bench.as_text(points)}")
    data = {"machine": machine, "points": [vars(point) for point in points]}
    bench_options.write_data(data_file, data)
    if plot_file is not None:
        bench.plot(points, machine, plot_file)
    sys.exit(int(any(point.failed for point in points if point.library == "zrpc")))
