"""Which thread Python's garbage collector runs in, and whether it has interrupted zrpc there.

The collector runs the finalizers (``__del__``) of objects that refer to each other, in any thread:
whichever has just made one object too many. In the midst of zrpc's own code, that thread may hold a
lock, or be the one that receives. So a finalizer that the collector runs there must neither take
zrpc's locks, as each new RRef does, nor wait for another worker.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import defaultdict
from functools import partial
from operator import itemgetter, methodcaller
from types import FrameType

from zrpc.errors import RpcError

# What zrpc calls while it holds a lock: its own code may be behind frames of these.
_BETWEEN = sys.stdlib_module_names | {"torch", "zmq"}


# The address of the frame that this thread runs, which is its `id`; None if it runs none, as a
# thread of C++. Not `sys._getframe`, which then raises an error, nor `sys._current_frames`: if the
# collector interrupts that function, another call of it would wait for a lock of its own thread.
_get_frame = ctypes.PyDLL(None).PyEval_GetFrame
_get_frame.restype = ctypes.c_void_p


class _Collection(defaultdict[str, int | None]):
    """The `id` of the frame that the collector has interrupted; empty if it does not run.

    The collector asks for an attribute with the name of each phase. No code of Python runs then:
    Ctrl-C that came meanwhile would be raised there, and be lost.
    """

    start = property(itemgetter("interrupted"))
    stop = property(methodcaller("clear"))


running = _Collection(_get_frame)
gc.callbacks.append(partial(getattr, running))


def interrupts_zrpc() -> bool:
    """Returns whether the collector runs in this thread, and has interrupted zrpc's own code.

    So the caller is a finalizer. Ask for `running` first, which is empty most of the time.
    """
    interrupted = running.get("interrupted")
    frame: FrameType | None = sys._getframe()
    while frame is not None and id(frame) != interrupted:  # not found if it is another thread's
        frame = frame.f_back
    while frame is not None:
        root = str(frame.f_globals.get("__name__")).partition(".")[0]
        # The constructor of each named tuple is in a module of its own.
        if root not in _BETWEEN and not root.startswith("namedtuple_"):
            return root == "zrpc"
        frame = frame.f_back
    return False


def check(what: str = "wait for another worker, though its call is made,") -> None:
    """Raises RpcError if this thread must not do ``what``. Ask for `running` first."""
    if interrupts_zrpc():
        raise RpcError(
            f"a finalizer (__del__) can't {what} if the garbage collector runs it in the midst of "
            "zrpc's own code: use rpc_async there, and don't wait for its future"
        )
