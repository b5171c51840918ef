"""The calls that may still begin once all workers of a mesh have called ``shutdown``.

A graceful shutdown waits until nothing is in progress. If threads could go on calling, it would
wait without limit. So only what is in progress goes on: handlers may call, and callbacks of calls.
A call of any other thread fails.

A thread that a handler has started, or that works for it in a pool of the program's, can't be told
from other threads. So any thread may call while a handler runs on its worker. But two such
threads must not bring about each other's handlers without limit. So each of these calls carries
its *hops*: how many of them, one after the other, have brought it about. The handlers of calls with
many hops don't count.

A call of a callback adds a hop too. A chain of callbacks, if each makes the next call, may go
on for some seconds, and in any case for many calls.
"""

from __future__ import annotations

import contextvars
import struct
import sys
from time import monotonic

from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.future import Future
from zrpc.calls.pending_requests import PendingRequests
from zrpc.errors import NotInitializedError, RpcError
from zrpc.runtime.thread_pool import HandlerPool, in_pool
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message

# A thread may call while a handler runs that fewer hops have brought about.
_MAX_HOPS = 8
# Such threads may make this number of calls with more than one hop. If they don't wait for their
# calls, these pile up, and the calls of each hop take longer than those of the one before.
_MAX_CALLS = 1000
# A chain of callbacks may make this number of calls in any case.
_CHAIN_CALLS = 1000

# Begun by a pass, which has begun before; see `zrpc.services.autograd.service`.
_OF_PASSES = frozenset((Kind.BACKWARD, Kind.DEPENDENCIES))
_HOPS = struct.Struct("<I")
_COMPLETE = Future._complete.__code__

# Of the latest call in this context: a callback has a copy of the context that added it.
_hops: contextvars.ContextVar[int] = contextvars.ContextVar("zrpc_hops", default=0)


class LastCalls:
    """Decides which calls of one worker may still begin. Any thread may call its methods.

    Args:
        requests: those that this worker has not answered.
        completions: runs callbacks.
        chain_seconds: for how long chains of callbacks may go on in any case.
    """

    def __init__(
        self, requests: PendingRequests, completions: HandlerPool, chain_seconds: float
    ) -> None:
        self._requests = requests
        self._completions = completions
        self._chain_seconds = chain_seconds
        self._chains_until = monotonic() + chain_seconds
        self._calls = 0  # about: a lost increment does no harm

    def admit(self, request: Message) -> list[tuple[int, bytes]]:
        """Returns the extensions of a request that this thread is about to send.

        Raises:
            NotInitializedError: this thread may no longer call.
            RpcError: it is in a chain of callbacks that goes on for too long.
        """
        if request.kind in _OF_PASSES:
            return []
        hops = self.check()
        _hops.set(hops)
        return [(Tag.HOPS, _HOPS.pack(hops))] if hops else []

    def check(self) -> int:
        """Returns the hops of a call that this thread begins.

        Raises:
            NotInitializedError, RpcError: as `admit`.
        """
        scope = current_scope()
        if scope is not None and self._requests.get(scope.caller.member_id, scope.call_id):
            return scope.hops
        if in_pool(self._completions) or _in_callback():
            hops = _hops.get() + 1
            if hops > _CHAIN_CALLS and monotonic() > self._chains_until:
                raise RpcError(
                    f"expected callbacks that end, found a chain of them that has made {hops - 1} "
                    f"calls in more than {self._chain_seconds:g} s since all workers have called "
                    "shutdown()"
                )
            return hops
        # Also in a shield, whose handler is among the requests.
        hops = min((each.scope.hops for each in self._requests.all()), default=_MAX_HOPS)
        if hops:
            self._calls += 1
        if hops >= _MAX_HOPS or (hops and self._calls > _MAX_CALLS):
            raise NotInitializedError(
                "all workers have called shutdown(), and this thread is neither a handler nor a "
                "callback, nor does a handler run here that may have started it: end threads that "
                "make calls before shutdown()"
            )
        return hops + 1


def read_hops(_: Message, data: bytes) -> int:
    """Reads the hops of a request."""
    return int(_HOPS.unpack(data)[0])


def _in_callback() -> bool:
    """Returns whether a call has completed a future in this thread, and that runs callbacks.

    A callback of a future that is done runs at once, in the thread that adds it. So does one of a
    future that the program itself completes. These are the calls of that thread.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _COMPLETE:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
