"""``zrpc debug``: attaches to a worker that stands at a breakpoint."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import click

from zrpc.launch.terminal import relay
from zrpc.services.debugger.prompt import SOCKET
from zrpc.services.inspection.discovery import ask, directories
from zrpc.services.inspection.snapshot import Snapshot
from zrpc.wire.member_id import rank_of

_ANSWER_SECONDS = 2.0


@click.command(short_help="Attach to a worker that stands at a breakpoint.")
@click.argument("worker", required=False, metavar="[RANK|NAME|PID]")
def command(worker: str | None) -> None:
    """Attach to a worker of this user on this host that stands at a breakpoint.

    Without an argument it is the one that has waited for the longest. The commands are pdb's: c
    goes on, q (or Ctrl-D) raises bdb.BdbQuit in the program. Ctrl-C detaches: the worker waits at
    its breakpoint for the next `zrpc debug`.

    Workers of `zrpc launch` on a terminal open their prompts there instead.

    The exit code is 0, or 1 if no such worker waits.
    """
    waiting = _waiting()
    chosen = [each for each in waiting if worker is None or worker in _names(each[1])]
    if not chosen:
        others = "; those that wait: " + _listed(waiting) if waiting else ""
        which = f"worker {worker}" if worker else "worker"
        raise click.ClickException(
            f"no {which} of this user waits at a breakpoint on this host{others}"
        )
    if worker is not None and len(chosen) > 1:
        raise click.ClickException(f"several meshes have one: {_listed(chosen)}; pass a process id")
    path, snapshot = chosen[0]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            raise click.ClickException(
                f"{snapshot.name} (pid {snapshot.pid}) does not wait any more: {error.strerror}"
            ) from error
        try:
            relay(connection)
        except KeyboardInterrupt:
            click.echo(f"\ndetached; {snapshot.name} waits: zrpc debug {snapshot.pid}", err=True)


def _waiting() -> list[tuple[Path, Snapshot]]:
    """Returns the sockets of the workers that wait, the oldest first."""
    found = [path for path in directories() if (path / SOCKET).is_socket()]
    answers = [each for each in ask(found, _ANSWER_SECONDS) if each.snapshots]
    pairs = [(Path(each.directory) / SOCKET, each.snapshots[0]) for each in answers]
    return sorted(pairs, key=lambda pair: _since(pair[0]))


def _since(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:  # the worker has left its breakpoint meanwhile
        return float("inf")


def _names(snapshot: Snapshot) -> set[str]:
    return {str(rank_of(snapshot.member)), snapshot.name, str(snapshot.pid)}


def _listed(waiting: list[tuple[Path, Snapshot]]) -> str:
    return ", ".join(f"{s.name} (rank {rank_of(s.member)}, pid {s.pid})" for _, s in waiting)
