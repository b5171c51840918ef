"""What the commands of ``zrpc bench`` share: options, a file for data, and their end by Ctrl-C."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from .options import POSITIVE, FiniteRange

_INTERRUPTED = 130  # the exit code of shells after Ctrl-C


class _DataFile(click.Path):
    """A file; refuses, before minutes of work, one that could not be written afterwards."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.exists():  # click has checked that it is writable
            return path
        directory = path.absolute().parent
        if not directory.is_dir():
            raise click.UsageError(f"there is no directory {path.parent} for {path.name}")
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise click.UsageError(f"{path} can't be written: {error.strerror}") from error
        return path


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def file(
    name: str, parameter: str, text: str, callback: Callable[..., Path | None] | None = None
) -> _Decorator:
    """Returns an option that names a file to write; the callback may refuse it."""
    kind = _DataFile(dir_okay=False, writable=True)
    return click.option(name, parameter, type=kind, help=text, callback=callback)


JSON = file("--json", "data_file", "Write the results to this file, as JSON.")


def rounds(default: int, text: str) -> _Decorator:
    """Returns the option for the number of rounds; ``text`` says what each measures."""
    return click.option(
        "--rounds",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help=f"Number of rounds. Each measures {text}.",
    )


def seconds(default: float, what: str) -> _Decorator:
    """Returns the option for the time that each of something takes."""
    return click.option(
        "--seconds",
        type=FiniteRange(min=0),
        default=default,
        show_default=True,
        help=f"Seconds for which each {what} is repeated in each round.",
    )


def deadline(text: str) -> _Decorator:
    """Returns the option for the time after which something has failed."""
    return click.option(
        "--deadline", type=POSITIVE, default=60.0, show_default=True, help=f"Seconds {text}."
    )


def write_data(path: Path | None, data: Any) -> None:
    """Writes data as JSON, if there is a path."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise click.ClickException(f"{path} can't be written: {error.strerror}") from error


def exit_interrupted() -> NoReturn:
    """Ends a command after Ctrl-C."""
    click.echo("interrupted", err=True)
    raise SystemExit(_INTERRUPTED)
