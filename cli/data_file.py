"""The file that a command writes its data to, and the exit code of an interrupted command."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

__all__ = ["FILE", "INTERRUPTED", "check_directory", "write_data"]

# The type of an option that names such a file.
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
INTERRUPTED = 130  # the exit code of shells after Ctrl-C


def check_directory(path: Path | None) -> None:
    """Refuses, before minutes of work, a file that could not be written afterwards."""
    if path is None or path.exists():  # click has checked that it is writable
        return
    directory = path.absolute().parent
    if not directory.is_dir():
        raise click.UsageError(f"there is no directory {path.parent} for {path.name}")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise click.UsageError(f"{path} can't be written: {error.strerror}") from error


def write_data(path: Path | None, data: Any) -> None:
    """Writes data as JSON, if there is a path."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise click.ClickException(f"{path} can't be written: {error.strerror}") from error
