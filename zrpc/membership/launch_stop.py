"""Why `zrpc launch` stops all workers, for those that still wait to meet the others.

A worker that handles SIGTERM would otherwise wait for workers that have exited.
"""

from __future__ import annotations

import os

from zrpc.errors import RendezvousError

__all__ = ["stop_error"]

_RUNTIME_DIRECTORY = "ZRPC_RUNTIME_DIR"
_NOTE = "launch-stops"  # written there by zrpc.launch.launcher


def stop_error() -> RendezvousError | None:
    """Returns an error with the reason; None if no launcher stops this worker."""
    directory = os.environ.get(_RUNTIME_DIRECTORY)
    if not directory:
        return None
    try:
        with open(os.path.join(directory, _NOTE)) as file:
            return RendezvousError(f"the launcher stops all workers: {file.read()}")
    except OSError:
        return None
