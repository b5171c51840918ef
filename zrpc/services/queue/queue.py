"""The queue that programs use; its methods block only in the process that it lives in."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from zrpc.actors import actor
from zrpc.calls.cancel_scope import current_scope
from zrpc.errors import OptionError, RpcCancelledError, RpcError
from zrpc.functions import DEFERRAL, Deferral
from zrpc.runtime.event_loop import running_loop
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.queue.contents import Contents, Item, Waiter
from zrpc.services.queue.size import measure

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT_MAX_BYTES = 1 << 30


class QueueCall(Deferral):
    """Marks a method of a queue that may wait: `QueueService` serves it without a thread.

    Attributes:
        waiter: returns what waits, from the arguments of the method.
    """

    __slots__ = ("waiter",)

    def __init__(self, waiter: Callable[..., Waiter]) -> None:
        self.waiter = waiter


def _served_by(waiter: Callable[..., Waiter]) -> Callable[[F], F]:
    def mark(method: F) -> F:
        setattr(method, DEFERRAL, QueueCall(waiter))
        return method

    return mark


def _put(item: Any, timeout: float | None = None) -> Waiter:
    size, plain, _ = measure(item)
    return Waiter(timeout=_checked(timeout), items=[Item(item, size, plain)])


def _put_nowait(item: Any) -> Waiter:
    return _put(item, 0)


def _get(timeout: float | None = None) -> Waiter:
    return Waiter(1, timeout=_checked(timeout))


def _get_nowait() -> Waiter:
    return _get(0)


def _get_batch(n: int, timeout: float | None = None) -> Waiter:
    if not isinstance(n, int) or n < 1:
        raise OptionError(f"expected a batch of 1 or more items, got {n!r}")
    return Waiter(n, batch=True, timeout=_checked(timeout))


def _checked(timeout: float | None) -> float | None:
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
        # Guards the contents. No other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self._contents = Contents(maxsize, maxbytes)

    @_served_by(_put)
    def put(self, item: T, timeout: float | None = None) -> None:
        """Adds an item at the end; waits until there is room.

        Args:
            item: the item. Within an autograd context, its tensors must not depend on others that
                need gradients: detach them.
            timeout: seconds; None for no limit beside that of the call.

        Raises:
            queue.Full: there was no room in time.
            QueueClosed: the queue is closed.
        """
        self._wait(_put(item, timeout))

    @_served_by(_get)
    def get(self, timeout: float | None = None) -> T:
        """Takes the first item; waits until there is one.

        Args:
            timeout: seconds; None for no limit beside that of the call.

        Raises:
            queue.Empty: there was none in time.
            QueueClosed: the queue is closed and empty, or all workers have called ``shutdown``.
        """
        return self._wait(_get(timeout))  # type: ignore[no-any-return]

    @_served_by(_get_batch)
    def get_batch(self, n: int, timeout: float | None = None) -> list[T]:
        """Takes the first items, at most ``n``; waits until there is one. Raises as `get`."""
        return self._wait(_get_batch(n, timeout))  # type: ignore[no-any-return]

    @_served_by(_put_nowait)
    def put_nowait(self, item: T) -> None:
        """Adds an item, or raises ``queue.Full`` at once; otherwise as `put`."""
        self._wait(_put_nowait(item))

    @_served_by(_get_nowait)
    def get_nowait(self) -> T:
        """Takes the first item, or raises ``queue.Empty`` at once; otherwise as `get`."""
        return self._wait(_get_nowait())  # type: ignore[no-any-return]

    def qsize(self) -> int:
        """Returns the number of items, which may change at once."""
        return len(self._contents.items)

    def empty(self) -> bool:
        """Returns whether there are no items."""
        return not self._contents.items

    def full(self) -> bool:
        """Returns whether a further item has to wait."""
        return self._contents.full()

    def close(self) -> None:
        """Takes no more items. Those that are there can be taken; then `get` raises.

        Calls that wait in `put` raise, too. It may be called again.
        """
        with self._lock:
            done = self._contents.close()
        _tell(done)

    def __len__(self) -> int:
        return self.qsize()

    def __repr__(self) -> str:
        contents = self._contents
        state = ", closed" if contents.closed else ""
        return f"<Queue of {len(contents.items)} items, {contents.nbytes} bytes{state}>"

    def __reduce__(self) -> NoReturn:
        raise RpcError(
            "a Queue can't be sent: make it by zrpc.remote, or put it into an RRef, and send that"
        )

    # -- for the service -----------------------------------------------------------------

    def ask(self, waiter: Waiter) -> bool:
        """Lets a call put or take; returns whether it is done at once.

        If it is not, ``waiter.done`` is called later, unless it leaves. With a timeout of 0, it is
        done in any case.

        :meta private:
        """
        with self._lock:
            done = self._contents.add(waiter)
            at_once = waiter in done
            if not at_once and waiter.timeout == 0:
                self._contents.remove(waiter)
                waiter.error = late(waiter)
                at_once = True
        _tell([each for each in done if each is not waiter])
        return at_once

    def leave(self, waiter: Waiter, error: BaseException | None = None) -> None:
        """Ends the wait of a call, if it still waits; with an error, it is told.

        :meta private:
        """
        with self._lock:
            left, done = self._contents.remove(waiter)
        if left and error is not None:
            waiter.error = error
            waiter.done(waiter)
        _tell(done)

    def give_back(self, items: Sequence[Item]) -> None:
        """Puts items back to the front, since their taker has not got them.

        :meta private:
        """
        with self._lock:
            done = self._contents.give_back(items)
        _tell(done)

    # -- within this process ---------------------------------------------------------------

    def _wait(self, waiter: Waiter) -> Any:
        """Puts or takes in this thread, which waits for it."""
        gate = threading.Lock()
        gate.acquire()
        waiter.done = lambda _: gate.release()
        try:
            if not self.ask(waiter):
                self._wait_for(waiter, gate)
            return waiter.result()
        except BaseException:  # Ctrl-C
            self._abandon(waiter)
            raise
        finally:
            waiter.items = []  # the scope refers to the waiter

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
            scope.when_cancelled(partial(self.leave, waiter, gone))
        seconds = -1 if waiter.timeout is None else min(waiter.timeout, threading.TIMEOUT_MAX)
        if not pass_gate(gate, seconds):
            self.leave(waiter, late(waiter))
            pass_gate(gate)  # if another thread is about to give it something, that is quick

    def _abandon(self, waiter: Waiter) -> None:
        """Ends the wait of a call that raises something else; it takes nothing."""
        self.leave(waiter)
        with self._lock:
            done = self._contents.give_back(waiter.items) if waiter.most else ()
            if waiter.most:
                waiter.items = []
        _tell(done)


def late(waiter: Waiter) -> BaseException:
    """Returns the error of a call that has waited for as long as it may."""
    return queue.Empty() if waiter.most else queue.Full()


def _tell(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        waiter.done(waiter)
