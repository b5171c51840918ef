"""The errors that end the work of a thread which goes on."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator


@contextlib.contextmanager
def printing_errors() -> Iterator[None]:
    """Prints an error of the block, as ``logging`` prints those of its own handlers.

    For what is logged last in a thread that must go on: a log handler of the program's own may
    fail, one that sends what it logs, say.
    """
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):  # no standard error is open
            traceback.print_exc()
