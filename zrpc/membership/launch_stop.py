"""Why `zrpc launch` stops all workers, for those that still wait to meet the others.

A worker that handles SIGTERM would otherwise wait for workers that have exited.
"""

from __future__ import annotations

import os

__all__ = ["stop_reason"]

_RUNTIME_DIRECTORY = "ZRPC_RUNTIME_DIR"
_NOTE = "launch-stops"  # written there by zrpc.launch.launcher


def stop_reason() -> str | None:
    """Returns what the launcher has noted; None if it stops nobody, or there is none."""
    directory = os.environ.get(_RUNTIME_DIRECTORY)
    if not directory:
        return None
    try:
        with open(os.path.join(directory, _NOTE)) as file:
            return file.read()
    except OSError:
        return None
