"""The call that a handler runs for, as the handler sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zrpc.cancel_scope import CancelScope, activate, current_scope, deactivate
from zrpc.errors import RpcError
from zrpc.worker_info import WorkerInfo

__all__ = ["Call", "current_call"]


class Call:
    """The call on whose behalf a handler runs; `current_call` returns it.

    A call ends early where the caller cancels its future, where its timeout passes, and where the
    caller dies. One that still waits for a thread then never runs. An ``async def`` handler is
    cancelled as an asyncio task is. Any other handler goes on, and can look at `cancelled` now and
    then; but calls that it waits for end with a `RpcCancelledError` or `RpcTimeoutError`, and so do
    those that it makes later.

    A call by `remote` makes a value that others than the caller may wait for. So its handler runs
    in any case, and `cancelled` stays false.

    All methods may be called from any thread.
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
        """Whether nobody waits for the result any more, so that the handler may as well stop."""
        return self._scope.over

    def time_remaining(self) -> float | None:
        """How long the caller still waits, in seconds, 0 or more; None where it has no limit."""
        return self._scope.remaining()

    def wait_cancelled(self, timeout: float | None = None) -> bool:
        """Waits until nobody waits for the result any more. Not for coroutines.

        In place of ``time.sleep`` it lets a handler stop early. Meanwhile the worker may run
        another handler in its place.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            `cancelled`.
        """
        return self._scope.wait(timeout)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """A block in which calls do not depend on this one, for what has to be done in any case.

        Calls made in it neither end with this call nor are bound by its deadline; they have their
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
    """The call that the handler which runs here was called by.

    Also in callbacks that the handler adds to futures, and in asyncio tasks that it starts; not in
    threads that it starts.

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
            "there is no current call: expected current_call() in a handler, that is in a function "
            "which another worker has called, and outside of Call.shield()"
        )
    return Call(scope)
