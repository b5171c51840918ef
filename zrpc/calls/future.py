"""The future of a call: a torch future that can be awaited, cancelled and interrupted by Ctrl-C."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any, NoReturn, Protocol, TypeVar

from zrpc.calls import trampoline
from zrpc.calls.asyncio_future import PENDING, AsyncioFuture
from zrpc.calls.future_callback import Callback, check_callback
from zrpc.calls.future_error import Failure, KeptError, without_frames
from zrpc.calls.pending_call import PendingCall, State
from zrpc.calls.pending_calls import PendingCalls
from zrpc.calls.taking import Taking
from zrpc.calls.torch_future import TorchFuture
from zrpc.errors import RpcCancelledError
from zrpc.runtime import garbage_collector
from zrpc.runtime.interrupts import (
    hold_interrupts,
    in_main_thread,
    raise_if_of_handler,
    release_interrupts,
    suppressing,
    uninterrupted,
)
from zrpc.runtime.resource_limits import stack_is_full
from zrpc.runtime.thread_pool import pass_gate
from zrpc.wire.exceptions import copied
from zrpc.wire.graph_capture import constant_of, is_tracing

logger = logging.getLogger(__name__)

# torch's own text.
_ALREADY_COMPLETE = (
    "Attempting to mark a completed Future as complete again. Note that a Future can only be "
    "marked completed once."
)

T = TypeVar("T")
S = TypeVar("S")


class Calling(Protocol):
    """Makes calls; see `zrpc.calls.caller.Caller`."""

    calls: PendingCalls

    def wait(self, call: PendingCall) -> None:
        """Waits until a call is settled."""

    def decode(self, outcome: Any) -> Any:
        """Returns the value of a call's outcome, or raises the callee's error."""

    def complete(self, job: Callable[[], None]) -> None:
        """Runs a job in another thread; used if no thread waits for the call."""

    def in_next_turn(self, errand: Callable[[], object]) -> None:
        """Runs a job in the I/O thread soon. Takes no locks."""

    def describe(self, call: PendingCall) -> str:
        """Returns what a call is of, and to which worker."""


def _see(future: Future[Any]) -> None:
    """Takes note that somebody has waited for the error of a future."""
    with suppressing(Exception):
        future.value()


def _no_source() -> None:
    """The source of a future that was not made by `then`."""


class Future(TorchFuture[T], AsyncioFuture[T]):
    """The future result of a call; `zrpc.rpc_async` returns it.

    It is a ``torch.futures.Future``, so ``torch.futures.wait_all`` and ``collect_all`` accept it.
    But they wait for all futures before they raise an error; `zrpc.wait_all` raises the first one.
    Beyond that:

    - ``await future`` gives its value in any asyncio event loop;
    - a handler that waits for it doesn't occupy one of the worker's running threads;
    - ``cancel`` ends the call, also on the callee;
    - Ctrl-C interrupts ``wait`` in the main thread;
    - an error that nobody asked for is logged when the future is dropped.

    Callbacks of `then` and `add_done_callback` run in one of the agent's threads, or in a thread
    that waits for the future; they may make calls of their own. Any thread may call its methods.
    A Future can't be pickled.

    Example:
        >>> future = Future()
        >>> doubled = future.then(lambda f: f.wait() * 2)
        >>> future.set_result(21)
        >>> doubled.wait()
        42

    See also ``torch.futures.Future``.
    """

    # Without a dictionary, which would be one more object for each call in flight.
    __slots__ = (
        "_call",
        "_calling",
        "_cancelled",
        "_failed",
        "_gate",
        "_kept",
        "_open",
        "_source",
        "_taking",
    )

    _failed: str  # only if it has: the name of the error's class
    _kept: KeptError  # only if the future has one
    _calling: Calling  # only if it was made by `of_call`
    _taking: Taking  # only if the callee asks whether the value of the call was taken

    def __init__(self, *, devices: list[Any] | None = None) -> None:
        super().__init__(devices=devices)
        # The call in flight that the future stands for, if any; see `of_call`.
        self._call: PendingCall | None = None
        # Returns the future that `then` made this one from, while that lives. A strong reference
        # would make a cycle.
        self._source: Callable[[], Future[Any] | None] = _no_source
        self._cancelled = False
        # Deleted by the one thread that completes the future; see `_claim`.
        self._open = True
        # Opens once the future is complete.
        self._gate = threading.Lock()
        self._gate.acquire()

    @classmethod
    def of_call(cls, call: PendingCall, calling: Calling) -> Future[T]:
        """Returns a future of ``call``.

        Args:
            call: the call, not yet sent, so that it can't be settled yet.
            calling: makes the call.

        :meta private:
        """
        future: Future[T] = cls()
        future._calling = calling
        future._call = call
        call.follower = future
        return future

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._summary()})"

    def _summary(self) -> str:
        call = self._call  # another thread may complete it meanwhile
        if self._cancelled:
            return "cancelled"
        if super().done():
            return f"failed: {self._failed}" if hasattr(self, "_failed") else "done"
        if call is None:
            return "pending"
        age = (
            "answered"
            if call.state >= State.UNSENT
            else f"pending {monotonic() - call.begun:.1f} s"
        )
        return f"{self._calling.describe(call)}, {age}"

    def wait(self) -> T:
        """Waits for the value and returns it, or raises the error of the call."""
        # In a callback: a job that this thread has postponed may complete this future.
        trampoline.run_postponed(self.done)
        call = self._call
        if call is not None:
            hold_interrupts()
            try:
                self._calling.wait(call)
            except BaseException:
                # Interrupted. If the call was settled meanwhile, another thread must complete it.
                if call.settled:
                    self._calling.complete(functools.partial(self._complete, call))
                release_interrupts()
                raise
            try:
                self._complete_here(call, held=True)
            except BaseException:
                if call.outcome:  # it has not begun, for lack of memory; other threads may wait too
                    self._calling.complete(functools.partial(self._complete, call))
                raise
        pass_gate(self._gate)
        return constant_of(super().wait) if is_tracing() else super().wait()

    def value(self) -> T:
        """Returns the value of a future that is done, or raises the error of the call."""
        if not self.done():
            raise RuntimeError(PENDING)
        return self.wait() if self._cancelled else super().value()

    def done(self) -> bool:
        """Returns whether there is a value or an error."""
        call = self._call
        if call is not None and call.settled:
            self._complete_here(call)
        return self._cancelled or super().done()

    def cancel(self, msg: object = None) -> bool:
        """Cancels the call, here and on the callee.

        A handler that still waits for its turn never runs. An ``async def`` handler is cancelled.
        Any other handler sees ``current_call().cancelled``.

        The future is done at once: `wait`, ``await`` and callbacks get a `RpcCancelledError`. What
        the callee did already is not undone. A future of `then` cancels the call that it was made
        from; the callback still runs, with the cancelled future, and its result is this future's
        value. If an asyncio task is cancelled while it awaits the future of a call, the call is
        cancelled as well.

        Args:
            msg: ignored; asyncio passes it.

        Returns:
            Whether it took effect; False if the future is done.

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
            if garbage_collector.running and garbage_collector.interrupts_zrpc():
                self._calling.in_next_turn(call.cancel)
                return not call.settled
            cancelled = call.cancel()
            # Another thread may be about to complete the future with that error.
            self._cancelled |= cancelled
            return cancelled
        if self.done():
            return False
        # False if another thread completes it at this moment.
        return self._complete_by(
            self._claim_for_cancel, None, [RpcCancelledError("the future was cancelled")]
        )

    def cancelled(self) -> bool:
        """Returns whether the future was cancelled, by `cancel` or with the call it belongs to."""
        self.done()
        return self._cancelled

    def set_result(self, result: T) -> None:
        """Completes the future with ``result``; raises RuntimeError if it is complete already.

        If it stands for a call, the call goes on at the callee, and its answer is dropped.
        """
        self._complete_by(self._claim_for_program, result)

    def set_exception(self, result: T | Exception) -> None:
        """Completes the future with an error, which `wait` and `value` raise; see `set_result`."""
        if not isinstance(result, Exception):
            raise TypeError(f"expected an Exception to set, but got {result!r}")
        self._complete_by(self._claim_for_program, None, [result])

    def _complete_by(
        self, claim: Callable[[], bool], result: Any, errors: list[BaseException] | None = None
    ) -> bool:
        """Completes the future if ``claim()``, with the error in a list, or a result.

        Ctrl-C must not come between the two: nobody else can complete the future then. If it
        fails, it may be called again.

        Returns:
            Whether it has completed the future.
        """
        with uninterrupted:
            if not claim():
                return False
            try:
                if errors:
                    self._keep_error(errors)
                else:
                    self._set(result)
            except BaseException:
                if not super().done():  # no memory for a frame, for example
                    self._open = True
                raise
            return True

    def _claim_for_program(self) -> bool:
        """Lets the program complete the future, instead of its call.

        Raises:
            RuntimeError: the future is complete, or its call's answer has arrived.
        """
        call = self._call
        if (call is not None and not call.withdraw()) or not self._claim():
            raise RuntimeError(_ALREADY_COMPLETE)
        self._call = None
        return True

    def _claim_for_cancel(self) -> bool:
        if not self._claim():
            return False
        self._cancelled = True  # first, since its callbacks may read it
        return True

    def _claim(self) -> bool:
        """Returns whether this thread must complete the future, by `_set` or `_fail`."""
        try:
            del self._open  # atomic under the interpreter's lock
        except AttributeError:
            return False
        return True

    def _set(self, result: T) -> None:
        # The gate opens first: torch runs the callbacks inside of set_result, and they may wait for
        # this future. `wait` then still waits for torch's own completion.
        if self._gate.locked():
            self._gate.release()
        self._set_and_call_back(result)

    def _fail(self, failure: Failure) -> None:
        """Completes the future with an error."""
        self._failed = failure.name
        self._set_unwrap_func(failure.raise_it)
        self._set(None)  # type: ignore[arg-type]

    def _keep_error(self, errors: list[BaseException]) -> None:
        """Completes the future with the error in a list; see `KeptError`."""
        self._kept = KeptError(errors)
        self._fail(self._kept.failure)

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Returns a future of what ``callback(self)`` returns, called once this future is done.

        If the callback raises, the new future fails with that error, ``SystemExit`` included; a
        TypeError becomes a `CallbackError`, which is a RuntimeError too, as in torch. A
        ``KeyboardInterrupt`` in the main thread, or an error of a signal's handler, is also raised
        there once the callbacks that are due have run: by the method of a future that ran them.

        Raises:
            TypeError: ``callback`` can't be called.
        """
        check_callback("then", callback)
        # See Callback about the lists.
        pending: list[Future[S]] = [Future()]
        result = pending.copy()
        result[0]._source = weakref.ref(self)
        self._add(Callback(callback, self, pending))
        return result.pop()

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Calls ``callback(self)`` once this future is done; an error in it is logged.

        For ``KeyboardInterrupt``, see `then`.

        Raises:
            TypeError: ``callback`` can't be called.
        """
        check_callback("add_done_callback", callback)
        if getattr(callback, "__module__", None) == "asyncio.tasks":
            self._call_soon(callback)
        else:
            self._add(Callback(callback, self, []))

    def _is_complete(self) -> bool:
        return super().done()

    def _begin_taking(self) -> Taking | None:
        call = self._call
        if call is not None:
            return Taking.of(call).join()
        taking = getattr(self, "_taking", None)  # if it is about to be complete
        return taking and taking.join()

    def _leave(self, taking: Taking | None) -> None:
        if taking is not None:
            self._calling.in_next_turn(functools.partial(taking.end, False))

    def _abandon(self) -> None:
        if self._is_complete():  # at the same moment
            _see(self)
        # Not a future that the program completes: others may wait for it as well.
        elif (self._call is not None or self._source() is not None) and not self.cancel():
            self.add_done_callback(_see)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("Can not pickle torch.futures.Future")

    def on_settled(self, call: PendingCall) -> bool:
        """Completes the future in another thread, unless a thread waits for it and will do so.

        Runs in the thread that settled the call, mostly the I/O thread, which must not run user
        code: unpickling and callbacks.

        :meta private:
        """
        if call.waiters:
            return True
        self._calling.complete(functools.partial(self._complete, call))
        return False

    def _complete_here(self, call: PendingCall, held: bool = False) -> None:
        """Does the same as `_complete`, in a thread of the program.

        If there is little room on its stack, another thread does it: an outcome that is claimed
        may not be lost.
        """
        if not stack_is_full():
            self._complete(call, held)
            return
        try:
            self._calling.complete(functools.partial(self._complete, call))
        finally:
            if held:
                release_interrupts()

    def _complete(self, call: PendingCall, held: bool = False) -> None:
        """Makes the value from the call's outcome, in the first thread that asks.

        Ends with signal handlers no longer held back, if they were ``held``.
        """
        if not held:
            hold_interrupts()
        outcome = call.claim()
        if outcome is None:
            release_interrupts()
            return
        self._cancelled = isinstance(outcome, RpcCancelledError)
        try:
            self._claim()
            if call.taking is not None:
                self._taking = call.taking
            self._call = None
            self._complete_from(functools.partial(self._calling.decode, outcome), held=True)
        except BaseException:
            if not (super().done() or in_main_thread()):  # it was never begun: no memory
                self._call = call
                call.outcome.append(outcome)
            raise
        finally:
            self._calling.calls.handed.discard(weakref.ref(call))
            if call.taking is not None and self._call is None:
                call.taking.end(None)  # by this future, if no task awaits it

    def _complete_from(self, decode: Callable[[], T], held: bool = False) -> None:
        """Makes the value; if Ctrl-C or another signal interrupts that, another thread does it."""
        interruptible = in_main_thread()
        try:
            try:
                if held:
                    release_interrupts()
                value = decode()
            except Exception as error:
                raise_if_of_handler(error)
                self._fail(Failure(decode, without_frames(error)))
            else:
                self._set(value)
        except BaseException as error:
            if not super().done():
                if interruptible:
                    with uninterrupted:
                        self._calling.complete(functools.partial(self._complete_from, decode))
                else:
                    self._fail(Failure(decode, copied(error)))
            raise
