"""The command line of zrpc."""

from __future__ import annotations

import errno
import importlib
import signal
import sys
from typing import Any

from . import first_process  # isort: skip  # noqa: F401 - imported before what takes a while

import click

# In the order in which they are shown.
_COMMANDS = (
    "launch",
    "env",
    "doctor",
    "run",
    "stacks",
    "top",
    "debug",
    "secret",
    "bench",
)


class _LazyGroup(click.Group):
    """Imports a command's module on first use, so that `--help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"zrpc.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # also as a command is imported; click would exit with 1
            sys.exit(128 + signal.SIGINT)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # click handles a pipe that nobody reads
            if error.errno != errno.ENOSPC:
                raise
            sys.exit(f"Error: could not write: {error}")


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torch-zrpc", prog_name="zrpc")  # looked up when asked for
@click.pass_context
def main(ctx: click.Context) -> None:
    """Remote calls, remote objects and distributed autograd for PyTorch, on ZeroMQ."""
    # `--help` does not need these:
    from zrpc.launch.descriptors import open_standard_descriptors
    from zrpc.launch.output import refuses_colours

    open_standard_descriptors()
    if refuses_colours():
        ctx.color = False
