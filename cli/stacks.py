"""``zrpc stacks``: what the workers of a running mesh do, and what they wait for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import click

from zrpc.inspection.meshes import Answer, MeshView, ask, directories, meshes
from zrpc.inspection.report import Report

from .finite_range import POSITIVE

# Between the two looks at a thread that may stand still, in seconds.
_STANDS_STILL = 0.3


@click.command(short_help="Show what running workers do and wait for.")
@click.argument("workers", nargs=-1, metavar="[PID|NAME]...")
@click.option(
    "--all", "idle", is_flag=True, help="Show threads that have nothing to do, too, and all frames."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--timeout",
    type=POSITIVE,
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for answers.",
)
def command(workers: tuple[str, ...], idle: bool, as_json: bool, timeout: float) -> None:
    """Show what the workers of running meshes do, and what they wait for.

    All meshes of this user that have a worker on this host, or those with a worker of this
    process id or name. For each worker: the calls that it waits for (→), those that it is to
    answer (←), and the Python stacks of its threads and coroutines. At the end: who waits in a
    circle, and who could not be asked. Workers are asked while they run, also where all of their
    threads wait; nothing is stopped.

    Exit code: 0, or 1 where there is no such mesh.
    """
    found, rest = meshes(ask(directories(), timeout))
    chosen = [mesh for mesh in found if _is_meant(mesh, workers)]
    rest = [answer for answer in rest if not workers or str(answer.pid) in workers]
    if not chosen and not rest:
        whose = f" with {' or '.join(workers)}" if workers else ""
        raise click.ClickException(f"no running mesh of this user{whose} was found on this host")
    for mesh in chosen:
        mesh.ask_other_hosts(timeout)
    if as_json:
        _print_json(chosen, rest)
        return
    for mesh in chosen:
        _print_mesh(mesh, idle, timeout)
    for answer in rest:
        who = f"pid {answer.pid}" if answer.pid else answer.directory
        _warn(f"A worker ({who}) could not be asked: {answer.problem}")


def _is_meant(mesh: MeshView, workers: Sequence[str]) -> bool:
    known = {*map(str, mesh.pids.values()), *mesh.names.values()}
    return not workers or bool(known & set(workers))


def _print_json(found: Sequence[MeshView], rest: Sequence[Answer]) -> None:
    content = {
        "meshes": [Report(mesh).as_dict() for mesh in found],
        "unknown": [{"pid": answer.pid, "why": answer.problem} for answer in rest],
    }
    json.dump(content, sys.stdout, indent=1)
    click.echo()


def _print_mesh(mesh: MeshView, idle: bool, timeout: float) -> None:
    report = Report(mesh, idle)
    click.secho(report.heading(), bold=True)
    for snapshot in mesh.snapshots.values():
        first, *lines = report.worker(snapshot)
        click.echo()
        click.secho(first, bold=True)
        for line in lines:
            click.echo(line)
    click.echo()
    circles = report.cycles()
    for lines in circles:
        click.secho("\n".join(lines) + "\n", fg="red")
    for lines in _suspects(report, mesh, timeout):
        click.secho("\n".join(lines) + "\n", fg="yellow")
    if not circles:
        click.echo("No circle of waiting was found.")
    for line in report.silent():
        _warn(line)
    click.echo()


def _suspects(report: Report, mesh: MeshView, timeout: float) -> list[list[str]]:
    """Looks a second time where a chain of waiting comes back to a thread that seems to stand."""
    if not report.comes_back():
        return []
    time.sleep(_STANDS_STILL)
    return report.suspects(mesh.seen_again(timeout))


def _warn(line: str) -> None:
    click.secho(line, fg="yellow")
