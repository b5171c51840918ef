"""``zrpc stacks``: shows what each running worker is doing and waiting for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import click

from zrpc.services.inspection.discovery import Answer, MeshView, find_meshes
from zrpc.services.inspection.report import Report

from .options import POSITIVE

_RECHECK_SECONDS = 0.3  # between two looks at a thread that may not be making progress


@click.command(short_help="Show what running workers do and wait for.")
@click.argument("workers", nargs=-1, metavar="[PID|NAME]...")
@click.option(
    "--all", "idle", is_flag=True, help="Also show idle threads, all frames, and what is alike."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--timeout",
    type=POSITIVE,
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to wait for answers.",
)
def command(workers: tuple[str, ...], idle: bool, as_json: bool, timeout: float) -> None:
    """Show what the workers of running meshes do and wait for.

    Shows all meshes of this user that have a worker on this host, or only those with a worker of
    the given process ids or names. For each worker: the calls that it waits for (→), the calls
    that it must answer (←), and the Python stacks of its threads and coroutines. At the end: the
    workers that wait for each other in a circle, and those that could not be asked. Workers keep
    running while they are asked, and answer even if all their threads wait.

    The exit code is 0, or 1 if there is no such mesh.
    """
    try:
        chosen, failed = find_meshes(workers, timeout)
    except LookupError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        _print_json(chosen, failed)
        return
    for mesh in chosen:
        _print_mesh(mesh, idle, timeout)
    for answer in failed:
        who = f"pid {answer.pid}" if answer.pid else answer.directory
        _warn(f"A worker ({who}) could not be asked: {answer.problem}")


def _print_json(found: Sequence[MeshView], failed: Sequence[Answer]) -> None:
    content = {
        "meshes": [Report(mesh).as_dict() for mesh in found],
        "unknown": [{"pid": answer.pid, "why": answer.problem} for answer in failed],
    }
    click.echo(json.dumps(content, indent=1))


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
    """Looks again if a chain of waits leads back to a thread that seems to make no progress."""
    if not report.comes_back():
        return []
    time.sleep(_RECHECK_SECONDS)
    return report.suspects(mesh.seen_again(timeout))


def _warn(line: str) -> None:
    click.secho(line, fg="yellow")
