"""What the workers of a driver print: shown by the driver's own ``sys.stdout``."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from typing import Any

from typing_extensions import override

from zrpc.launch.output import Console


class StreamConsole(Console):
    """Writes to what is ``sys.stdout`` or ``sys.stderr`` at that time.

    In a notebook that is the output of the cell that runs, or has run last. Such a stream may have
    no descriptor, and any encoding.
    """

    @override
    def _write(self, error: bool, data: bytes) -> None:
        stream: Any = sys.stderr if error else sys.stdout
        if stream is None or not data:
            return
        with self._lock:
            self.blocked = True
            try:
                # IPython's stream looks in the context for a cell. This thread's is that which has
                # started the mesh; without any, it takes the present one.
                contextvars.Context().run(_put, stream, data)
            finally:
                self.blocked = False


def _put(stream: Any, data: bytes) -> None:
    # It may be closed, or of any class: the worker must not wait for it without limit.
    with contextlib.suppress(Exception):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = data.decode(errors="backslashreplace")
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
