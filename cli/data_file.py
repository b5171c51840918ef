"""The file that a command writes its data to, and the exit code of one that was interrupted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

__all__ = ["FILE", "INTERRUPTED", "check_directory", "write_data"]

# The type of such an option.
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
# What shells have for Ctrl-C.
INTERRUPTED = 130


def check_directory(path: Path | None) -> None:
    """Refuses, before minutes of work, a file that could not be written after them."""
    if path is None or path.exists():  # of which click has seen that it can be written
        return
    directory = path.absolute().parent
    if not directory.is_dir():
        raise click.UsageError(f"there is no directory {path.parent} for {path.name}")
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise click.UsageError(f"{path} can't be written: {error.strerror}") from error


def write_data(path: Path | None, data: Any) -> None:
    """Writes data as JSON, where a file is named."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise click.ClickException(f"{path} can't be written: {error.strerror}") from error
