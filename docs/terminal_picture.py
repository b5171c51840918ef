"""Draws what a command prints on a terminal, as an SVG: pictures of real runs.

``python docs/terminal_picture.py FILE.svg COLUMNS COMMAND`` runs the command by a shell.
"""

from __future__ import annotations

import fcntl
import html
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text


def run(command: str, columns: int) -> str:
    """Returns what a command prints on a terminal, with the codes of colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    with subprocess.Popen(
        ["bash", "-c", command], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ):
        os.close(theirs)
        parts = []
        while part := _read(ours):
            parts.append(part)
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux: the last process has closed the terminal
        return b""


def picture(command: str, output: str, columns: int) -> str:
    """Returns an SVG of a terminal, whose description is its text."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    text = Text.from_ansi(output.rstrip())
    console.print(Text(f"$ {command}", style="bold"))
    console.print(text)
    svg = console.export_svg(title="", unique_id="zrpc", font_aspect_ratio=0.61)
    title = html.escape(f"A terminal: {command}", quote=False)
    described = html.escape(f"$ {command}\n{text.plain}", quote=False)
    return svg.replace(
        'xmlns="http://www.w3.org/2000/svg">',
        f'role="img" xmlns="http://www.w3.org/2000/svg">\n<title>{title}</title>\n'
        f"<desc>{described}</desc>",
        1,
    )


if __name__ == "__main__":
    file, columns, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    file.write_text(picture(command, run(command, columns), columns))
