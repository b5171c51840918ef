"""``zrpc env``: prints which place in a mesh a worker would take here, and where that is from."""

from __future__ import annotations

import sys

import click

from zrpc.membership.cluster_environment import SETTINGS, looked_for
from zrpc.membership.init_method import own_settings, own_variables


@click.command(short_help="Print which rank, world size and master a worker would take here.")
def command() -> None:
    """Print which rank, world size and master a worker would take here.

    Each value is followed by the variable that it is from: torch's, or those of Open MPI, Slurm,
    PMI or a Kubernetes indexed Job. Run it as the engine runs your script, such as srun zrpc env.

    The exit code is 1 if init_rpc() without arguments would not find a rank or the master,
    otherwise 0.
    """
    settings = own_settings()
    for name in SETTINGS:
        if name in settings:
            click.echo(f"{name}={settings[name].value} from {settings[name].source}")
        else:
            click.echo(f"{name} not found")
    if "world_size" not in settings:
        click.echo("without a world size, the mesh is elastic: workers join and leave it")
    needed = ("rank", "master_addr", "master_port")
    missing = [name for name in needed if name not in settings]
    if missing:
        click.echo(f"{', '.join(missing)}: {looked_for(own_variables(), *missing)}", err=True)
        sys.exit(1)
