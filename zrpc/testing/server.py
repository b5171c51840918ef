"""The warm fork server that is shared by all meshes of processes that this process starts."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Sequence

from zrpc.launch.starter import DEFAULT_PRELOAD, Starter
from zrpc.runtime.forks import free_in_child
from zrpc.testing.leaks import lasting
from zrpc.testing.procfs import state_of

logger = logging.getLogger(__name__)

_PRELOAD = (
    *DEFAULT_PRELOAD,
    "zrpc.testing.child",
    "_pytest.assertion.rewrite",  # unpickling the functions of a test module imports it
    "torch._dynamo",  # the first optimizer and DDP import it, in more than a second
)
# The lock guards the server: one thread at a time may start it, or ask it for exit codes.
server_lock = free_in_child(threading.Lock())
_server: Starter | None = None
_of_parent: Starter | None = None  # is kept, so that nothing of it is closed


def warm_server(preload: Sequence[str] = ()) -> Starter:
    """Returns the process's fork server, and starts it (a few seconds) on the first call.

    The server exits with this process. May be called from any thread.

    Args:
        preload: further modules for it to import, if this call starts it.

    Raises:
        LaunchError: the server could not be started.
    """
    global _server
    with server_lock:
        if _server is not None and (_server.broken or state_of(_server.pid) in ("", "Z")):
            _server.close()  # its children die with it
            _server = None
        if _server is None:
            with lasting():
                server = Starter(preload=(*_PRELOAD, *preload))
                server.start()
            if server.note:
                logger.warning("meshes of processes start slowly: %s", server.note)
            atexit.register(server.close)
            _server = server
        return _server


def _after_fork() -> None:
    """Lets a forked child start a server of its own: the other one is its parent's."""
    global _server, _of_parent
    if _server is not None:
        atexit.unregister(_server.close)
        _server, _of_parent = None, _server


os.register_at_fork(after_in_child=_after_fork)
