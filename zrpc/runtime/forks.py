"""Forks of this process, and how a forked child that leaves its handler exits.

A handler may fork. If its function returns or raises in the child, what would follow there is the
worker's own work, through the parent's sockets: the answer to the call, and the next job.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

__all__ = ["exit_child"]

# The number of forks between the first process and this one.
generation = 0


def exit_child(error: BaseException | None = None) -> NoReturn:
    """Exits this process, a forked child, as a program does that ends with ``error``."""
    code = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = (error.code or 0) & 0xFF
        elif isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # it is closed, or None
                stream.flush()
    finally:
        # Not sys.exit: this thread runs a handler, and the exit handlers are the parent's.
        os._exit(code)


def _count() -> None:
    global generation
    generation += 1


os.register_at_fork(after_in_child=_count)
