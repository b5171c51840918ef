"""The queue that programs use; its methods block only in the process that it lives in."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

from zrpc.actors import actor
from zrpc.calls.cancel_scope import current_scope
from zrpc.constants import Seconds
from zrpc.errors import OptionError, RpcCancelledError, RpcError
from zrpc.functions import DEFERRAL, Deferral
from zrpc.runtime.event_loop import running_loop
from zrpc.runtime.interrupts import uninterrupted
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.queue.contents import Contents, Item, Waiter, late
from zrpc.services.queue.size import measure

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT_MAX_BYTES = 1 << 30


class QueueCall(Deferral):
    """Marks a method of a queue that may wait: `QueueService` serves it without a thread.

    Attributes:
        waiter: returns what waits, from the queue and the arguments of the method.
    """

    __slots__ = ("waiter",)

    def __init__(self, waiter: Callable[..., Waiter]) -> None:
        self.waiter = waiter


def _waits(make: F) -> F:
    """Makes a method that waits, of one that returns what waits."""

    @functools.wraps(make)
    def method(self: Queue[Any], *args: Any, **kwargs: Any) -> Any:
        return self._wait(make(self, *args, **kwargs))

    setattr(method, DEFERRAL, QueueCall(make))
    return method  # type: ignore[return-value]


def _putter(item: Any, timeout: Seconds | None) -> Any:
    size, _ = measure(item)
    return Waiter(timeout=_checked(timeout), items=[Item(item, size)])


def _taker(most: int, timeout: Seconds | None, batch: bool = False) -> Any:
    return Waiter(most, batch, _checked(timeout))


def _checked(timeout: Seconds | None) -> float | None:
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool):  # 1 second, though the standard library's means no limit
        raise OptionError(
            f"expected a timeout in seconds, or None, got {timeout}: there is no argument `block`, "
            "as in queue.Queue; use put_nowait or get_nowait, or leave it out to wait"
        )
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
        raise OptionError(f"expected a timeout of 0 or more seconds, or None, got {timeout!r}")
    return timeout


@actor
class Queue(Generic[T]):
    """A queue of items between workers, first in, first out.

    Make it by `zrpc.remote`, pass its RRef around, and call its methods through that:
    ``queue.rpc_sync().put(item)``. It is an actor, so calls of one worker begin in the order in
    which it made them, and `RRef.stop` ends it. A call that waits takes no thread of the owner and
    holds up no other one. It is also bounded by the timeout of the call, 60 seconds by default;
    pass ``queue.rpc_sync(timeout=0)`` to wait without limit. In a coroutine, use
    ``await queue.rpc_async().get()``.

    A call that is cancelled or times out, or whose worker dies, takes no item: an item that was
    sent to it goes back to the front. So each item has at most one taker. Items stay when the
    worker that put them dies. They are lost with the worker that owns the queue.

    On its owner, ``queue.local_value()`` is the queue itself, whose methods then block the thread
    that calls them, as those of ``queue.Queue``. Any thread may call them, but no coroutine.

    Args:
        maxsize: the most items; 0 for no limit.
        maxbytes: the most bytes of all items together, 1 GiB by default; 0 for no limit. Tensors
            and arrays count, also within containers and attributes of objects. A single item may be
            larger, if the queue is empty.

    Raises:
        OptionError: a bound is negative, or no number.

    Example:
        >>> import zrpc
        >>> queue = remote("worker1", zrpc.Queue, args=(100,))
        >>> for number in range(3):
        ...     queue.rpc_sync().put(number)
        >>> queue.rpc_sync().get(), queue.rpc_sync().get_batch(32)
        (0, [1, 2])
    """

    def __init__(self, maxsize: int = 0, maxbytes: int = _DEFAULT_MAX_BYTES) -> None:
        for bound in (maxsize, maxbytes):
            if not isinstance(bound, (int, float)) or not bound >= 0:
                raise OptionError(
                    f"expected bounds of 0 (no limit) or more, got maxsize={maxsize!r} and "
                    f"maxbytes={maxbytes!r}"
                )
        self.contents = Contents(maxsize, maxbytes)

    @_waits
    def put(self, item: T, timeout: Seconds | None = None) -> None:
        """Adds an item at the end; waits until there is room.

        Args:
            item: the item. Within an autograd context, its tensors must not depend on others that
                need gradients: detach them.
            timeout: seconds; None for no limit beside that of the call.

        Raises:
            queue.Full: there was no room in time.
            QueueClosed: the queue is closed.
        """
        return _putter(item, timeout)  # type: ignore[no-any-return]

    @_waits
    def get(self, timeout: Seconds | None = None) -> T:
        """Takes the first item; waits until there is one.

        Args:
            timeout: seconds; None for no limit beside that of the call.

        Raises:
            queue.Empty: there was none in time.
            QueueClosed: the queue is closed and empty, and no item on its way can come back. Or
                all workers have called ``shutdown``.
        """
        return _taker(1, timeout)  # type: ignore[no-any-return]

    @_waits
    def get_batch(self, n: int, timeout: Seconds | None = None) -> list[T]:
        """Takes the first items, at most ``n``; waits until there is one. Raises as `get`."""
        if not isinstance(n, int) or n < 1:
            raise OptionError(f"expected a batch of 1 or more items, got {n!r}")
        return _taker(n, timeout, batch=True)  # type: ignore[no-any-return]

    @_waits
    def put_nowait(self, item: T) -> None:
        """Adds an item, or raises ``queue.Full`` at once; otherwise as `put`."""
        return _putter(item, 0)  # type: ignore[no-any-return]

    @_waits
    def get_nowait(self) -> T:
        """Takes the first item, or raises ``queue.Empty`` at once; otherwise as `get`."""
        return _taker(1, 0)  # type: ignore[no-any-return]

    def qsize(self) -> int:
        """Returns the number of items, which may change at once."""
        return len(self.contents.items)

    def empty(self) -> bool:
        """Returns whether there are no items."""
        return not self.contents.items

    def full(self) -> bool:
        """Returns whether a further item has to wait."""
        return self.contents.full()

    def close(self) -> None:
        """Takes no more items. Those that are there can be taken; then `get` raises.

        While an item on its way to another call may come back, `get` waits. Calls that wait in
        `put` raise, too. It may be called again.
        """
        self.contents.close()

    def __len__(self) -> int:
        return self.qsize()

    def __repr__(self) -> str:
        contents = self.contents
        state = ", closed" if contents.closed else ""
        return f"<Queue of {len(contents.items)} items, {contents.nbytes} bytes{state}>"

    def __reduce__(self) -> NoReturn:
        raise RpcError(
            "a Queue can't be sent: make it by zrpc.remote, or put it into an RRef, and send that"
        )

    # -- within this process ---------------------------------------------------------------

    def _wait(self, waiter: Waiter) -> Any:
        """Puts or takes in this thread, which waits for it."""
        gate = threading.Lock()
        gate.acquire()
        waiter.done = lambda _: gate.release()
        try:
            if not self.contents.add(waiter):
                self._wait_for(waiter, gate)
            result = waiter.result()
            with uninterrupted:
                if waiter.most:
                    self.contents.note_taken(len(waiter.items))
                waiter.items = []  # the scope refers to the waiter
            return result
        except BaseException:  # Ctrl-C
            with uninterrupted:
                self.contents.remove(waiter)
                if waiter.most:
                    self.contents.give_back(waiter.items)
                waiter.items = []
            raise

    def _wait_for(self, waiter: Waiter, gate: threading.Lock) -> None:
        """Waits until the gate is open, or the waiter has left."""
        if running_loop() is not None:
            raise RpcError(
                "this call of a queue has to wait, and would hold up all coroutines of this "
                "thread: use the queue's RRef, as in `await queue.rpc_async().get()`"
            )
        scope = current_scope()
        if scope is not None:  # of a handler: it must not outlive its caller
            gone = RpcCancelledError("the caller no longer waits for the answer")
            scope.when_cancelled(functools.partial(self.contents.remove, waiter, gone))
        seconds = -1 if waiter.timeout is None else min(waiter.timeout, threading.TIMEOUT_MAX)
        if not pass_gate(gate, seconds):
            self.contents.remove(waiter, late(waiter))
            pass_gate(gate)  # if another thread is about to give it something, that is quick
