"""``zrpc launch``: starts N workers of a script on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from zrpc.drop_in import child_environment
from zrpc.errors import OptionError
from zrpc.launch import Job, LaunchError, launch
from zrpc.launch.starter import METHODS
from zrpc.services.metrics.address import METRICS_PORT, metrics_address

from .options import NOT_NEGATIVE, POSITIVE, sectioned


def _variables(ctx: click.Context, _: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if value.find("=") < 1:
            raise click.BadParameter(f"expected NAME=VALUE, but got {value!r}")
    return dict(value.split("=", 1) for value in values)


def _roles(ctx: click.Context, _: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        role, _equals, count = value.rpartition("=")
        if not role or not count.isdecimal() or role in found:
            raise click.BadParameter(f"expected NAME=NUMBER, each name once, but got {value!r}")
        found[role] = int(count)
    return found


def _note_late_options(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Notes an option of ours that stands after the script, if there is only one worker."""
    if ctx.get_parameter_source("nprocs") is not ParameterSource.DEFAULT:
        return
    ours = {option for param in ctx.command.params for option in param.opts if option[0] == "-"}
    for arg in args:
        if arg.split("=", 1)[0] in ours - {"-m"}:
            click.echo(
                f"zrpc launch: note: {arg} stands after the script and is passed to it; options of "
                "the launcher come before the script",
                err=True,
            )
            return


def _launch_traced(job: Job, path: Path) -> int:
    """Launches workers, and writes what they have recorded to a file."""
    path.write_text("")  # if that is not possible, it is better known now
    with tempfile.TemporaryDirectory(prefix="zrpc-trace-") as directory:
        code = launch(replace(job, env={**job.env, "ZRPC_TRACE": directory}))
        # Not before: it imports torch, and the launcher forks.
        from zrpc.services.tracing.service import merge

        try:
            workers, cut = merge(Path(directory), path)
        except (OSError, ValueError) as error:
            click.echo(f"Error: the trace {path} can't be written: {error}", err=True)
            return code or 1
    found = f"the trace of {workers} of {job.nprocs} workers is in {path}"
    click.echo("\n".join(f"zrpc launch: {each}" for each in (found, *cut)), err=True)
    return code


# The variable, and the function, that make a worker stop at an error; see
# zrpc.services.debugger. By name, since `--help` must not import torch.
_PDB = "ZRPC_PDB"
_POST_MORTEM = "zrpc.services.debugger.debugger:post_mortem"

_SECTIONS = {
    "Workers": (
        *("nprocs", "module", "no_python", "roles", "name_prefix", "env", "start_method"),
        "drop_in",
    ),
    "Output": ("log_dir", "trace"),
    "Debugging and metrics": ("pdb", "metrics_port"),
    "Stopping": ("timeout", "grace"),
    "Restarts": ("max_restarts",),
    "Workers that join and leave": ("elastic", "listen", "join"),
    "Network": ("iface",),
}


@click.command(
    cls=sectioned(_SECTIONS),
    short_help="Start workers of a script and watch them.",
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    epilog="Exit codes: 0 if all workers exited with 0; the code of the worker that failed first; "
    "124 after the timeout; 128 plus the number of a signal to the launcher; 141 if the output was "
    "closed by its reader; 2 for a wrong command line.",
)
@click.option(
    "-n",
    "--nprocs",
    "--nproc-per-node",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of workers to start on this machine.",
)
@click.option(
    "--role",
    "roles",
    metavar="NAME=NUMBER",
    multiple=True,
    callback=_roles,
    help="Start this number of workers of a role, in place of --nprocs: --role learner=1 --role "
    "rollout=4 names them learner0, rollout0 and so on, and sets ZRPC_ROLE. Can be repeated.",
)
@click.option(
    "--name-prefix",
    default="worker",
    show_default=True,
    help="The start of each worker's name, which its rank follows: init_rpc() takes it from "
    "ZRPC_WORKER_NAME.",
)
@click.option(
    "--env",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_variables,
    help="Set a variable in the workers' environment. Can be repeated.",
)
@click.option(
    "--iface",
    metavar="NAME|ADDRESS",
    help="The network interface on which workers listen if they use TCP (sets ZRPC_IFACE). "
    "[default: the one with the route to their meeting address]",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also keep each worker's output in this directory: rank0.out, rank0.err and so on, "
    "and rank0.1.out after its first restart.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Record all workers until they exit, and write one file for https://ui.perfetto.dev.",
)
@click.option(
    "--timeout",
    type=POSITIVE,
    metavar="SECONDS",
    help="Stop all workers after this time and exit with 124.",
)
@click.option(
    "--grace",
    type=NOT_NEGATIVE,
    metavar="SECONDS",
    default=30.0,
    show_default="30",
    help="How long workers that are asked to stop may take, for example to save a checkpoint, "
    "until they are killed.",
)
@click.option(
    "--start-method",
    type=click.Choice(METHODS),
    help="Fork workers from a process that has imported torch, or start a new interpreter for "
    "each. [default: fork]",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often each failed worker is started again, while the others keep running.",
)
@click.option("--elastic", is_flag=True, help="Let workers join and leave: there is no world size.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="With --elastic: the address where workers meet. [default: 127.0.0.1 and a free port]",
)
@click.option(
    "--join",
    metavar="HOST:PORT",
    help="With --elastic: add the workers to the running mesh at this address.",
)
@click.option(
    "--drop-in",
    is_flag=True,
    help="Put zrpc in the place of torch.distributed.rpc in the workers, as `zrpc run` does.",
)
@click.option(
    "--pdb",
    is_flag=True,
    help="Open the debugger at each error that a handler or the script raises, and at "
    "breakpoint(), while the other workers wait.",
)
@click.option(
    "--metrics-port",
    metavar="[ADDRESS:]PORT",
    help="Serve each worker's zrpc.stats() to Prometheus, at this port plus its local rank (sets "
    "ZRPC_METRICS_PORT). [default address: 127.0.0.1]",
)
@click.option(
    "--no-python",
    is_flag=True,
    help="SCRIPT is a program that isn't run by Python: a shell script, or any command.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module name, as after python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    script: str,
    args: tuple[str, ...],
    env: dict[str, str],
    iface: str | None,
    metrics_port: str | None,
    trace: Path | None,
    drop_in: bool,
    pdb: bool,
    roles: dict[str, int],
    **others: Any,
) -> None:
    """Start N workers of SCRIPT on this machine and watch them until all have exited.

    \b
      zrpc launch -n 4 train.py --lr 0.1
      zrpc launch -n 4 -m package.train
      zrpc launch -n 4 --max-restarts 3 train.py
      zrpc launch --role learner=1 --role rollout=4 train.py

    This is for one machine. On several, start the workers with torchrun or with a scheduler.

    All arguments after SCRIPT are its own. Each worker gets its rank and the others' address in
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under
    torchrun, and a secret for this run in ZRPC_SECRET, unless one is set already.
    OMP_NUM_THREADS is 1, unless it is set or there is one worker. Worker 0 has the launcher's
    standard input, the others have none.

    Each line of output is shown with its worker's rank. When a worker fails, the others are
    stopped, its traceback is shown last, and its exit code is the launcher's. Ctrl-C stops all
    workers: gently first, by force after --grace, and at once if pressed again. Ctrl-Z suspends
    them, and SIGUSR1 and SIGUSR2 are passed on to them.

    With --max-restarts, a failed worker is instead started again with the same rank and joins
    the others, which keep running. TORCHELASTIC_RESTART_COUNT counts its restarts. With --elastic,
    WORLD_SIZE is not set, and a second launch with --join can add workers.
    """  # noqa: D301 - click looks for that character
    _note_late_options(ctx, args)
    if roles and ctx.get_parameter_source("nprocs") is ParameterSource.DEFAULT:
        others["nprocs"] = sum(roles.values())
    if drop_in:
        os.environ.update(child_environment(os.environ))
    if iface is not None:
        env = {**env, "ZRPC_IFACE": iface}
    if metrics_port is not None:
        env = {**env, METRICS_PORT: metrics_port}
        try:
            metrics_address({METRICS_PORT: metrics_port}, others["nprocs"] - 1)
        except OptionError as error:  # or each worker would start, and fail by it
            raise click.BadParameter(str(error), param_hint="--metrics-port") from error
    if pdb:
        env = {"PYTHONBREAKPOINT": "zrpc.breakpoint", **env, _PDB: "1"}
    job = Job(script, args, roles=roles, env=env, on_error=_POST_MORTEM if pdb else "", **others)
    try:
        code = launch(job) if trace is None else _launch_traced(job, trace)
    except (ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from error
    except (LaunchError, OSError) as error:
        raise click.ClickException(_explained(error)) from error
    except KeyboardInterrupt:  # before there were workers, or as their traces are put together
        code = 128 + signal.SIGINT
    sys.exit(code)


def _explained(error: Exception) -> str:
    from zrpc.runtime.resource_limits import advice  # only now: `zrpc --help` must be quick

    hint = advice(error)
    return f"{error}; {hint}" if hint else str(error)
