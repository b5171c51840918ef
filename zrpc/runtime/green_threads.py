"""The check that threads are the system's, not gevent's or eventlet's."""

from __future__ import annotations

import sys

from zrpc.errors import RpcError

# By library: its module, the function that says whether it has replaced a part of the standard
# library, the parts that zrpc needs, and how to leave them as they are.
_LIBRARIES = {
    "gevent": (
        "gevent.monkey",
        "is_module_patched",
        ("threading", "queue"),
        "gevent.monkey.patch_all(thread=False, queue=False)",
    ),
    "eventlet": (
        "eventlet.patcher",
        "is_monkey_patched",
        ("thread",),
        "eventlet.monkey_patch(thread=False)",
    ),
}


def check_threads() -> None:
    """Raises an RpcError if another library has replaced Python's threads.

    All of its threads run in one of the system. The first that waits in C++ code would stop them
    all.
    """
    for library, (module, name, parts, call) in _LIBRARIES.items():
        replaced = getattr(sys.modules.get(module), name, None)
        if replaced is not None and any(map(replaced, parts)):
            raise RpcError(
                f"expected Python's own threads, found those of {library}: call {call}, or use "
                f"zrpc in a process that {library} has not patched"
            )
