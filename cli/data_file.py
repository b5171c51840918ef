"""The file that a command writes its data to, and the exit code of an interrupted command."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click

INTERRUPTED = 130  # the exit code of shells after Ctrl-C


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


# The type of an option that names such a file.
FILE = _DataFile(dir_okay=False, writable=True)


def write_data(path: Path | None, data: Any) -> None:
    """Writes data as JSON, if there is a path."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise click.ClickException(f"{path} can't be written: {error.strerror}") from error
