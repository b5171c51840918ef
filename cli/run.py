"""``zrpc run``: runs a Python program with zrpc in the place of torch's RPC."""

from __future__ import annotations

import os
import sys
from itertools import groupby

import click

from zrpc.drop_in import child_environment
from zrpc.launch.interpreter import interpreter_options


@click.command(
    short_help="Run a program that uses torch.distributed.rpc, on zrpc.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--check",
    is_flag=True,
    help="Run nothing. List the names of torch's RPC that SCRIPT and its imports use, and which of "
    "them zrpc doesn't support. Exits with 1 if there is one.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module name, as after python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(check: bool, module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run SCRIPT as python does, with zrpc in the place of torch.distributed.rpc.

    The program is not changed, nor are the libraries that it uses. Their imports of torch's RPC,
    distributed autograd, DistributedOptimizer and RemoteModule find zrpc's. All Python processes
    that the program starts run in the same way. All arguments after SCRIPT are its own.

    The exit code is the program's; with --check, 1 if a name is not supported, 2 if SCRIPT
    can't be read, otherwise 0.

    \b
    Examples:
      zrpc run train.py --epochs 3
      zrpc run -m my_package.train
      zrpc run -m torch.distributed.run --nproc-per-node 2 train.py
      zrpc run --check train.py
    """  # noqa: D301 - click looks for that character
    if check:
        _check(script, module)
        return
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise click.UsageError(
            "expected a Python that reads PYTHONPATH and site, but it was started with -I, -E or -S"
        )
    # The interpreter starts afresh, so that the program has the process to itself.
    program = ["-m", script] if module else [script]
    command_line = [sys.executable, *interpreter_options(), *program, *args]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if it is closed
            stream.flush()  # what a sitecustomize has printed, say
    os.execve(sys.executable, command_line, child_environment(os.environ))


def _check(script: str, module: bool) -> None:
    from zrpc.drop_in.check import uses_in_program

    try:
        uses, unread = uses_in_program(script, module)
    except FileNotFoundError as error:
        raise click.UsageError(str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise click.UsageError(
            f"expected a program that this Python can read, but {script!r} is none: {error}"
        ) from error
    for line in unread:
        click.echo(f"not checked: {line}", err=True)
    count = unsupported = 0
    for name, group in groupby(uses, key=lambda use: use.name):
        places = list(group)
        count += 1
        problem = places[0].problem()
        unsupported += problem is not None
        click.echo(f"{name}: {'supported' if problem is None else f'NOT SUPPORTED; {problem}'}")
        for use in places:
            click.echo(f"    {use.path}:{use.line}")
    click.echo(f"{count} names of torch's RPC, {unsupported} not supported")
    sys.exit(1 if unsupported else 0)
