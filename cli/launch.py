"""``zrpc launch``: N workers of a script on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zrpc.launch import Job, LaunchError, launch
from zrpc.launch.method import METHODS

from .finite_range import POSITIVE


def _variables(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for (name, equals, _), value in zip(pairs, values, strict=True):
        if not (name and equals):
            raise click.BadParameter(f"expected NAME=VALUE, but got {value!r}")
    return {name: text for name, _, text in pairs}


@click.command(
    short_help="Start workers of a script, and watch them.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-n", "--nprocs", type=click.IntRange(min=1), default=1, show_default=True, help="Workers."
)
@click.option(
    "--name-prefix",
    default="worker",
    show_default=True,
    help="Workers are named by this and their rank.",
)
@click.option(
    "--env",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_variables,
    help="A variable for the workers' environment. Can be repeated.",
)
@click.option(
    "--iface",
    metavar="NAME|ADDRESS",
    help="The network interface on which workers listen, where they do: ZRPC_IFACE. "
    "[default: the one that leads to where they meet]",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep each worker's output here too, in rank0.out and rank0.err.",
)
@click.option(
    "--timeout",
    type=POSITIVE,
    metavar="SECONDS",
    help="Stop all workers after this time, with exit code 124.",
)
@click.option(
    "--start-method",
    type=click.Choice(METHODS),
    help="Fork workers from a process that has imported torch, or start each from nothing. "
    "[default: fork on Linux, spawn elsewhere]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often each worker that fails is started again, while the others go on.",
)
@click.option("--elastic", is_flag=True, help="Workers join and leave: there is no world size.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="With --elastic: where the workers meet. [default: 127.0.0.1 and a free port]",
)
@click.option(
    "--join",
    metavar="HOST:PORT",
    help="With --elastic: add the workers to the mesh that meets there.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as after python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    nprocs: int,
    name_prefix: str,
    env: dict[str, str],
    iface: str | None,
    log_dir: Path | None,
    timeout: float | None,
    start_method: str | None,
    max_restarts: int,
    elastic: bool,
    listen: str | None,
    join: str | None,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Start N workers of SCRIPT on this machine, and watch them until all have ended.

    What follows SCRIPT are its own arguments. Each worker finds its rank and how to reach the
    others in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
    under torchrun, and a secret of this run in ZRPC_SECRET, unless there is one already.
    OMP_NUM_THREADS is 1, unless it is set or there is one worker. Worker 0 has the launcher's
    standard input, the others have none.

    Output is shown with the worker's rank. When a worker fails, the others are stopped, its
    traceback is shown last, and its exit code is the launcher's. Ctrl-C stops all workers,
    after 3 seconds less gently, and at once when pressed again.

    With --max-restarts, a worker that fails is started again instead, under its rank, and
    joins the others that go on; how often is in TORCHELASTIC_RESTART_COUNT. With --elastic,
    WORLD_SIZE is not set, and more workers can be added by a second launch with --join.
    """
    job = Job(
        script,
        args,
        nprocs=nprocs,
        module=module,
        name_prefix=name_prefix,
        env=env if iface is None else {**env, "ZRPC_IFACE": iface},
        log_dir=log_dir,
        timeout=timeout,
        start_method=start_method,
        max_restarts=max_restarts,
        elastic=elastic,
        listen=listen,
        join=join,
    )
    try:
        code = launch(job)
    except (ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from error
    except (LaunchError, OSError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)
