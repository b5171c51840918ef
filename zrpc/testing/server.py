"""The warm fork server that all meshes of processes of this process share."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence

from zrpc.launch.forkserver import ForkServer
from zrpc.launch.starter import DEFAULT_PRELOAD
from zrpc.testing.leaks import lasting
from zrpc.testing.proc import state_of

__all__ = ["server_lock", "warm_server"]

# Functions of a test module call pytest's assertion rewriting when they are unpickled.
_PRELOAD = (*DEFAULT_PRELOAD, "zrpc.testing.child", "_pytest.assertion.rewrite")
# The lock guards the server, which one thread at a time may start or ask for exits.
server_lock = threading.Lock()
_server: ForkServer | None = None


def warm_server(preload: Sequence[str] = ()) -> ForkServer:
    """The process's fork server, started (some seconds) when first asked for.

    It ends with this process. May be called from any thread.

    Args:
        preload: modules that it imports as well, where this call starts it.

    Raises:
        LaunchError: it could not be started.
    """
    global _server
    with server_lock:
        if _server is not None and state_of(_server.pid) in ("", "Z"):
            _server.close()  # it was killed; its children died with it
            _server = None
        if _server is None:
            with lasting():
                server = ForkServer(preload=(*_PRELOAD, *preload))
                server.start()
            atexit.register(server.close)
            _server = server
        return _server
