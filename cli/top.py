"""``zrpc top``: shows live what the workers of running meshes do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from zrpc.launch.descriptors import readable
from zrpc.services.inspection.discovery import Answer, MeshView, find_meshes
from zrpc.services.inspection.rates import WorkerRates, mesh_rates

from .options import POSITIVE

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_KEYS_HELP = "↑ ↓ choose   Enter one worker   Esc back   < > sort   q quit"
_UP, _DOWN, _ESCAPE = "\x1b[A", "\x1b[B", "\x1b"
# For an answer at least, however short the interval is: a busy machine may need it.
_MIN_ANSWER_SECONDS = 1.0
# The rest of an arrow key's sequence has come with its beginning, or soon after.
_SEQUENCE_SECONDS = 0.05
_MAX_KEY_BYTES = 16


@click.command(short_help="Show live what running workers do.")
@click.argument("workers", nargs=-1, metavar="[PID|NAME]...")
@click.option("--sort", default="rank", show_default=True, help="The column to sort by.")
@click.option(
    "--interval",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Look for one interval, print, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON, for programs.")
def command(
    workers: tuple[str, ...], sort: str, interval: float, once: bool, as_json: bool
) -> None:
    """Show live what the workers of running meshes do.

    Shows all meshes of this user that have a worker on this host, or only those with a worker of
    the given process ids or names. Workers need no option for that, and are not held up.

    \b
    Keys: up and down choose a worker, Enter shows its functions and peers, Esc goes
    back; < and > choose the column to sort by; q or Ctrl-C quits.

    The exit code is 0, or 1 if there is no such mesh.
    """  # noqa: D301 - click looks for that character
    if as_json and not once:
        raise click.UsageError("--json is for --once: there is no end to write otherwise")
    if not as_json:
        _check(sort)
    sampler = _Sampler(workers, interval)
    try:
        sampler.look()
        if once:
            time.sleep(interval)
            sampler.look()
            _print(sampler, sort, as_json)
        else:
            _Screen(sampler, sort).run()
    except LookupError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        return


def _check(sort: str) -> None:
    try:
        from .top_tables import SORT_KEYS
    except ImportError as error:
        raise click.ClickException(
            f"{error}; the tables need rich: pip install rich, or use --once --json"
        ) from error
    if sort not in SORT_KEYS:
        raise click.BadParameter(f"expected one of {', '.join(SORT_KEYS)}", param_hint="--sort")


class _Sampler:
    """Asks the meshes again and again, and keeps what happened between the last two looks."""

    def __init__(self, workers: tuple[str, ...], interval: float) -> None:
        self.interval = interval
        self.meshes: list[list[WorkerRates]] = []
        self.unknown: list[Answer] = []
        self._wanted = workers
        self._views: list[MeshView] = []

    def look(self) -> None:
        """Asks once; the rates are those since the last time.

        Raises:
            LookupError: there are no meshes.
        """
        before = [each for view in self._views for each in view.snapshots.values()]
        timeout = max(self.interval, _MIN_ANSWER_SECONDS)
        self._views, self.unknown = find_meshes(self._wanted, timeout, numbers=True)
        self.meshes = [mesh_rates(before, view) for view in self._views]


def _title(workers: list[WorkerRates]) -> str:
    lost = sum(worker.state == "lost" for worker in workers)
    number = len(workers) - lost
    title = f"Mesh of {number} workers" if number != 1 else "Mesh of 1 worker"
    return f"{title}, {lost} lost" if lost else title


def _print(sampler: _Sampler, sort: str, as_json: bool) -> None:
    if as_json:
        content = {
            "meshes": [{"workers": [asdict(worker) for worker in m]} for m in sampler.meshes],
            "unknown": [{"pid": each.pid, "why": each.problem} for each in sampler.unknown],
        }
        click.echo(json.dumps(content, indent=1))
        return
    from .top_tables import mesh_table, sorted_workers

    console = _console()
    for workers in sampler.meshes:
        console.print(mesh_table(_title(workers), sorted_workers(workers, sort), sort, console))
    for each in sampler.unknown:
        console.print(f"A worker (pid {each.pid or 'unknown'}) could not be asked: {each.problem}")


def _console() -> Console:
    """Returns a console that shows ``?`` for what the output's encoding lacks, an ellipsis say."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console()


class _Screen:
    """The live screen. For one thread."""

    def __init__(self, sampler: _Sampler, sort: str) -> None:
        from .top_tables import SORT_KEYS

        self._sampler = sampler
        self._keys = SORT_KEYS
        self._sort = SORT_KEYS.index(sort)
        self._chosen = 0
        self._detail = False
        self._next_look = 0.0

    def run(self) -> None:
        """Shows until q is pressed."""
        from rich.live import Live

        console = _console()
        if not console.is_terminal or not sys.stdin.isatty():
            raise click.UsageError("expected a terminal; for a file or a program, use --once")
        with _keys() as read, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                now = time.monotonic()
                if now >= self._next_look:
                    self._sampler.look()
                    self._next_look = time.monotonic() + self._sampler.interval
                live.update(self._render(console), refresh=True)
                key = read(max(0.0, self._next_look - time.monotonic()))
                if key in ("q", "\x03"):
                    return
                self._on_key(key)

    def _on_key(self, key: str) -> None:
        count = sum(map(len, self._sampler.meshes))
        if key in (_DOWN, "j"):
            self._chosen = min(self._chosen + 1, count - 1)
        elif key in (_UP, "k"):
            self._chosen = max(self._chosen - 1, 0)
        elif key in ("\r", "\n"):
            self._detail = True
        elif key in (_ESCAPE, "\x7f"):
            self._detail = False
        elif key in ("<", ">"):
            step = 1 if key == ">" else -1
            self._sort = (self._sort + step) % len(self._keys)

    def _render(self, console: Console) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from .top_tables import mesh_table, sorted_workers, worker_screen

        key = self._keys[self._sort]
        meshes = [sorted_workers(workers, key) for workers in self._sampler.meshes]
        everyone = [worker for workers in meshes for worker in workers]
        self._chosen = min(self._chosen, max(0, len(everyone) - 1))
        chosen = everyone[self._chosen] if everyone else None
        parts: list[RenderableType]
        if self._detail and chosen is not None:
            parts = [worker_screen(chosen, max(3, (console.height - 12) // 2), console)]
        else:
            parts = [
                mesh_table(_title(workers), workers, key, console, chosen) for workers in meshes
            ]
        return Group(*parts, Text(_KEYS_HELP, style="dim"))


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Returns a function that waits for a key; the terminal is as before when the block ends."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    modes = termios.tcgetattr(fd)
    unread = b""  # the key that has come so soon after Esc that it might have belonged to it

    def read(timeout: float) -> str:
        nonlocal unread
        if not unread and not readable(fd, timeout=timeout):
            return ""
        key, unread = unread or os.read(fd, 1), b""
        while key.startswith(b"\x1b") and len(key) < _MAX_KEY_BYTES:
            if len(key) > 2 and key[-1:].isalpha():
                break
            if not readable(fd, timeout=_SEQUENCE_SECONDS):
                break
            more = os.read(fd, 1)
            if len(key) == 1 and more not in (b"[", b"O"):  # what sequences begin with
                unread = more
                break
            key += more
        return key.decode(errors="replace") or "q"  # nothing: the terminal is gone

    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, modes)
