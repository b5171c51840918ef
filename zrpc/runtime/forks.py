"""Forks of this process: which locks are free in the child, and how one exits in a handler.

A handler may fork. If its function returns or raises in the child, what would follow there is the
worker's own work, through the parent's sockets: the answer to the call, and the next job.

A lock that another thread held when the process forked is never released in the child, which does
not have that thread. So the locks that a process has only once are free there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn, TypeVar

L = TypeVar("L")

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


def free_in_child(lock: L) -> L:
    """Returns a lock or a condition of a module, which is free in each forked child from now on."""
    reinit: Any = lock._at_fork_reinit  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=reinit)
    return lock


def _count() -> None:
    global generation
    generation += 1


os.register_at_fork(after_in_child=_count)
