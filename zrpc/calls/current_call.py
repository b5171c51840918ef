"""The call that a handler serves, as the handler sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zrpc.calls.cancel_scope import CancelScope, activate, current_scope, deactivate
from zrpc.constants import Seconds
from zrpc.errors import RpcError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import call_timeout


class Call:
    """The call that a handler serves; `current_call` returns it.

    A call ends early if the caller cancels its future, if its timeout passes, or if the caller
    dies. If its handler still waits for a thread, it never runs. An ``async def`` handler is
    cancelled like any asyncio task. Any other handler goes on, and can check `cancelled` now and
    then. But calls that it waits for end with a `RpcCancelledError` or `RpcTimeoutError`, and so do
    calls that it makes later.

    A call by `remote` makes a value that other workers than the caller may wait for. So its handler
    runs in any case, and `cancelled` stays false.

    Any thread may call its methods.
    """

    __slots__ = ("_scope",)

    def __init__(self, scope: CancelScope) -> None:
        self._scope = scope

    @property
    def caller(self) -> WorkerInfo:
        """The worker that made the call."""
        return self._scope.caller

    @property
    def cancelled(self) -> bool:
        """Whether the caller no longer waits for the result, so that the handler may stop."""
        return self._scope.abandoned

    def time_remaining(self) -> float | None:
        """Returns for how many seconds the caller still waits, 0 or more; None for no limit."""
        return self._scope.remaining()

    def wait_cancelled(self, timeout: Seconds | None = None) -> bool:
        """Waits until the caller no longer waits for the result. Not for coroutines.

        Use it instead of ``time.sleep`` so that a handler can stop early. While it waits, the
        worker may run another handler in its place.

        Args:
            timeout: seconds, 0 to look only; None for no limit.

        Returns:
            `cancelled`.
        """
        return self._scope.wait(None if timeout is None else call_timeout(timeout))

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Returns a context manager in which calls don't depend on this one, such as for clean-up.

        Calls made in it don't end with this call and aren't bound by its deadline; they have their
        own timeouts. There is no `current_call` in it.

        Example:
            >>> def handler(lock):
            ...     call = current_call()
            ...     lock.rpc_sync().acquire()
            ...     try:
            ...         while not call.wait_cancelled(0.1):
            ...             pass
            ...     finally:
            ...         with call.shield():
            ...             lock.rpc_sync().release()
        """
        token = activate(None)
        try:
            yield
        finally:
            deactivate(token)

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "waited for"
        return f"<Call from {self.caller}, {state}>"


def current_call() -> Call:
    """Returns the call that the current handler serves.

    It also works in callbacks that the handler adds to futures, and in asyncio tasks that it
    starts, but not in threads that it starts.

    Raises:
        RpcError: no handler runs here.

    Example:
        >>> def search(items, wanted):
        ...     for item in items:
        ...         if current_call().cancelled:
        ...             return None
        ...         if item == wanted:
        ...             return item
        >>> rpc_sync("worker1", search, args=([1, 2, 3], 2))
        2
    """
    scope = current_scope()
    if scope is None:
        raise RpcError(
            "there is no current call: expected current_call() in a handler, which is a function "
            "that another worker has called, and outside of Call.shield()"
        )
    return Call(scope)
