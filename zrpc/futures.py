"""The Future of a call: torch's, which can also be awaited and interrupted by Ctrl-C."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeVar

import torch

from zrpc import callbacks
from zrpc.calls import PendingCall
from zrpc.errors import RpcCancelledError
from zrpc.future_error import Failure, KeptError, without_frames
from zrpc.pool import acquire

__all__ = ["Future"]

logger = logging.getLogger(__name__)

# As torch says it.
_ALREADY = (
    "Attempting to mark a completed Future as complete again. Note that a Future can only be "
    "marked completed once."
)

T = TypeVar("T")
S = TypeVar("S")


def _no_source() -> None:
    """Of a future that was not made by `then`."""


class Future(torch.futures.Future[T]):
    """What `zrpc.rpc_async` returns: a result that is on its way.

    It is a ``torch.futures.Future``, so that ``torch.futures.wait_all`` and ``collect_all``
    take it. Beyond that:

    - ``await future`` gives its value in any asyncio event loop;
    - a handler that waits for it does not hold one of the worker's running threads;
    - ``cancel`` ends the call, also at the callee;
    - Ctrl-C interrupts ``wait`` in the main thread;
    - an error that nobody asked for is logged when the future is dropped.

    Callbacks of `then` and `add_done_callback` run in a thread of the agent's, or in the
    thread that waits for the future; they may make calls of their own. All methods may be
    called from any thread. A Future can't be pickled.

    Example:
        >>> future = Future()
        >>> doubled = future.then(lambda f: f.wait() * 2)
        >>> future.set_result(21)
        >>> doubled.wait()
        42

    See also ``torch.futures.Future``.
    """

    # Not in a dictionary, which would be one more object of each call under way.
    __slots__ = (
        "_call",
        "_cancelled",
        "_decode",
        "_gate",
        "_kept",
        "_open",
        "_schedule",
        "_source",
    )

    _kept: KeptError  # only where the future has one
    _decode: Callable[[Any], T]  # as `of_call` was given them
    _schedule: Callable[[Callable[[], None]], None]

    def __init__(self, *, devices: list[Any] | None = None) -> None:
        super().__init__(devices=devices)
        # Set where the future stands for a call under way; see `of_call`.
        self._call: PendingCall | None = None
        # What this future is made of by `then`, as long as that lives; a strong reference would
        # make a cycle, by way of torch's list of callbacks.
        self._source: Callable[[], Future[Any] | None] = _no_source
        self._cancelled = False
        # Deleted by who completes the future, which only one thread can; see `_take`.
        self._open = True
        # Open once the torch future below is complete.
        self._gate = threading.Lock()
        self._gate.acquire()

    @classmethod
    def of_call(
        cls,
        call: PendingCall,
        decode: Callable[[Any], T],
        schedule: Callable[[Callable[[], None]], None],
    ) -> Future[T]:
        """A future of ``call``.

        Args:
            call: the call, not yet sent, so that it can't be settled yet.
            decode: makes the value from the call's outcome, or raises the callee's error.
            schedule: has a job done in another thread; used where nobody waits.
        """
        future: Future[T] = cls()
        future._decode = decode
        future._schedule = schedule
        future._call = call
        call.follower = future
        return future

    def wait(self) -> T:
        """Waits for the value and returns it, or raises what the call failed with."""
        # In a callback: what it waits for may be what this thread has put off.
        callbacks.work_off(self.done)
        call = self._call
        if call is not None:
            try:
                call.wait()
            except BaseException:
                # Interrupted: should the call be settled just now, somebody must complete it.
                if call.settled:
                    self.on_settled(call)
                raise
            self._complete(call)
        acquire(self._gate)
        self._gate.release()
        return super().wait()

    def value(self) -> T:
        """The value of a future that is done, or raises what the call failed with."""
        self.done()
        return self.wait() if self._cancelled else super().value()

    def done(self) -> bool:
        """Whether there is a value or an error."""
        call = self._call
        if call is not None and call.settled:
            self._complete(call)
        return self._cancelled or super().done()

    def cancel(self) -> bool:
        """Ends the call, and has the callee told: one that still waits there for its turn never
        runs, an ``async def`` handler is cancelled, any other sees ``current_call().cancelled``.

        The future is done at once: `wait`, ``await`` and callbacks get a `RpcCancelledError`. What
        the callee did already is not undone. A future of `then` cancels the call that it was made
        of; its own value is still what the callback makes of that. An asyncio task that is
        cancelled while it awaits the future of a call does the same.

        Returns:
            Whether it took effect; False where the future is done.

        Example:
            >>> future = rpc_async("worker1", lambda: current_call().wait_cancelled(10))
            >>> future.cancel(), future.cancelled(), future.cancel()
            (True, True, False)
        """
        source = self._source()
        if source is not None:
            return source.cancel()
        call = self._call
        if call is not None:
            cancelled = call.cancel()
            # Another thread may be about to complete it with that.
            self._cancelled |= cancelled
            return cancelled
        if self.done():
            return False
        if not self._take():
            return False  # completed just now by another thread
        self._cancelled = True  # first, since its callbacks may ask
        self._keep(RpcCancelledError("the future was cancelled"))
        return True

    def cancelled(self) -> bool:
        """Whether this future was cancelled, by `cancel` or with the call that it is part of."""
        self.done()
        return self._cancelled

    def set_result(self, result: T) -> None:
        """Completes the future with ``result``; an error where it is complete already.

        The call that it may stand for goes on at the callee, and its answer is dropped.
        """
        self._take_over()
        self._set(result)

    def set_exception(self, result: T | Exception) -> None:
        """Completes the future with an error, which `wait` and `value` raise; see `set_result`."""
        if not isinstance(result, Exception):
            raise TypeError(f"expected an Exception to set, but got {result!r}")
        self._take_over()
        self._keep(result)

    def _take_over(self) -> None:
        """For the program, which is about to complete the future.

        Raises:
            RuntimeError: it is complete, or its call's answer has come.
        """
        call = self._call
        if (call is not None and not call.withdraw()) or not self._take():
            raise RuntimeError(_ALREADY)
        self._call = None

    def _take(self) -> bool:
        """Whether the current thread is the one to complete the future, by `_set` or `_fail`."""
        try:
            del self._open  # atomic under the interpreter's lock
        except AttributeError:
            return False
        return True

    def _set(self, result: T) -> None:
        # The gate opens first, since torch runs the callbacks inside of set_result and they
        # may wait for this future; what is left to wait for is torch's own completion.
        if self._gate.locked():
            self._gate.release()
        super().set_result(result)
        if callbacks.interrupts:
            callbacks.raise_interrupt()

    def _fail(self, fail: Callable[[], Any], for_log: BaseException) -> None:
        """Completes the future with the error that ``fail()`` raises; see `Failure`."""
        self._set_unwrap_func(Failure(fail, for_log).raise_it)
        self._set(None)  # type: ignore[arg-type]

    def _keep(self, error: BaseException) -> None:
        """Completes the future with an error."""
        self._kept = KeptError(error)
        self._fail(self._kept.way(), self._kept.spare)

    def then(self, callback: Callable[[Any], S]) -> Future[S]:
        """A future of what ``callback(self)`` returns, called once this one is done.

        Whatever the callback raises, also ``SystemExit``, the new future fails with. A
        ``KeyboardInterrupt`` in the main thread is raised there as well, once the callbacks that
        are due have run: by the method of a future in which they did.
        """
        # See _Callback about the lists.
        pending: list[Future[S]] = [Future()]
        result = pending.copy()
        result[0]._source = weakref.ref(self)
        self._add(_Callback(callback, self, pending))
        return result.pop()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls ``callback(self)`` once this future is done; an error in it is logged.

        About ``KeyboardInterrupt`` see `then`.
        """
        self._add(_Callback(callback, self, []))

    def _add(self, callback: _Callback) -> None:
        # Where it is done the callback runs right here, and what it makes is there afterwards.
        at_once = super().done()
        super().add_done_callback(functools.partial(callbacks.run, callback, at_once=at_once))
        if callbacks.interrupts:
            callbacks.raise_interrupt()

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def on_done(future: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrive)

        self.add_done_callback(on_done)
        try:
            yield from arrived
        except asyncio.CancelledError:
            # But not a future that somebody else completes, for which others may wait as well.
            if self._call is not None or self._source() is not None:
                self.cancel()
            raise
        return self.value()

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("Can not pickle torch.futures.Future")

    def on_settled(self, call: PendingCall) -> None:
        """Has the future completed elsewhere, where no thread waits that would do it.

        Runs in the thread that settled the call, mostly the I/O thread, which must not run
        what the user wrote: unpickling and callbacks.

        :meta private:
        """
        if not call.waited_for:
            self._schedule(functools.partial(self._complete, call))

    def _complete(self, call: PendingCall) -> None:
        """Makes the value from the call's outcome; only the first caller gets to do it."""
        outcome = call.claim()
        if outcome is None:
            return
        self._cancelled = isinstance(outcome, RpcCancelledError)
        decode = functools.partial(self._decode, outcome)
        self._take()
        try:
            value = decode()
        except Exception as error:
            self._fail(decode, without_frames(error))
        except BaseException:  # Ctrl-C in the midst of it
            self._fail(decode, KeyboardInterrupt())
            raise
        else:
            self._set(value)
        finally:
            self._call = None


class _Callback:
    """A callback, to be called by `zrpc.callbacks` once its future is done.

    Args:
        function: what the user wrote.
        future: its argument.
        results: the future of what it returns, where there is one. An error of the function's
            refers by its traceback to our frames, and where ``future`` was done already, to that of
            `Future.then`. None of them refers to the future that keeps the error, which so is freed
            without the garbage collector: it is taken out of this list when it has the error.
    """

    __slots__ = ("_context", "_function", "_future", "_results", "_taken")

    def __init__(
        self, function: Callable[[Any], Any], future: Future[Any], results: list[Future[Any]]
    ) -> None:
        self._function = function
        self._future = future
        self._results = results
        self._taken = False
        # Calls in the callback belong where it was added: to its agent, its autograd context
        # and its deadline.
        self._context = contextvars.copy_context()

    def __call__(self) -> None:
        try:
            value = self._context.run(self._function, self._future)
        except BaseException as error:  # SystemExit too: somebody may wait for the new future
            self.fail(error)
        else:
            if self._results and self._take():
                self._results[0]._set(value)
            self._results.clear()

    def _take(self) -> bool:
        """Whether it completes the new future, which the program may have done itself."""
        self._taken = self._taken or self._results[0]._take()
        return self._taken

    def fail(self, error: BaseException) -> None:
        noted = callbacks.note_interrupt(error)
        if not self._results:
            if not noted:
                logger.error("A callback of a Future failed", exc_info=error)
            return
        if self._take() and not self._results[0].done():
            self._results[0]._keep(error)
        self._results.clear()
