"""The callbacks of futures: what they are called with, and what becomes of their results."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from typing import Any

from zrpc.calls import trampoline
from zrpc.errors import CallbackError
from zrpc.runtime.interrupts import run_interruptibly

logger = logging.getLogger(__name__)


def check_callback(method: str, callback: object) -> None:
    """Raises TypeError, with torch's text, if a method can't take a callback."""
    if not callable(callback):
        raise TypeError(  # the beginning is torch's own text
            f"{method}(): incompatible function arguments. Expected a function that takes the "
            f"future, but got {callback!r}"
        )


def call_or_repeat(callback: Callable[[Any], object], future: Any) -> None:
    """Calls a callback, and once more if it fails: there was no memory for a frame, for example.

    For one that may be called again, and whose result threads may wait for.
    """
    try:
        callback(future)
    except BaseException:
        callback(future)
        raise


class Callback:
    """A callback that `zrpc.calls.trampoline` runs once its future is done.

    Args:
        function: the user's function.
        future: its argument.
        results: the future of its result, if there is one. An error of the function refers by its
            traceback to our frames, and to that of `Future.then` if ``future`` was done already.
            None of these frames refers to the future that keeps the error, since it is removed from
            this list then. So it is freed without the garbage collector.
    """

    __slots__ = ("_called", "_claimed", "_context", "_function", "_future", "_results")

    def __init__(self, function: Callable[[Any], Any], future: Any, results: list[Any]) -> None:
        self._function = function
        self._future = future
        self._results = results
        self._claimed = False
        self._called = False  # whether the function was called, or is not to be called again
        # Calls in the callback have the agent, the autograd context and the deadline of the code
        # that added it.
        self._context = contextvars.copy_context()

    def __call__(self) -> None:
        """Calls the function, and completes the new future with what it returns or raises.

        Raises:
            MemoryError, RecursionError: it could not call it, and there is no new future.
        """
        errors: list[BaseException] = []
        try:
            value = run_interruptibly(self._context.run, self._function, self._future)
            self._called = True
        except BaseException as error:  # SystemExit too: a thread may wait for the new future
            self._called = self._called or _has_begun(error)
            if not (self._called or self._results):
                raise
            errors.append(self._failed(error))
        if errors:
            self._complete_with(errors)
            return
        if self._results and self._claim():
            self._results[0]._set(value)
        self._results.clear()

    def _claim(self) -> bool:
        """Returns whether to complete the new future: the program may have done so itself."""
        self._claimed = self._claimed or self._results[0]._claim()
        return self._claimed

    def fail(self, error: BaseException) -> None:
        """Completes the new future with an error, unless it is done.

        If there is none, and the function was not called, it is called now: a thread may wait for
        what it does.
        """
        if self._called or self._results:
            self._complete_with([self._failed(error)])
        else:
            self._called = True
            self()

    def _failed(self, error: BaseException) -> BaseException:
        """Returns the error for the new future; logs it if there is none."""
        noted = trampoline.note_interrupt(error)
        if not self._results:
            if not noted:
                logger.error("A callback of a Future failed", exc_info=error)
            return error
        if type(error) is TypeError and error.__cause__ is None:  # not one of another worker
            text = f"Got the following error when running the callback: TypeError: {error}"
            wrapped = CallbackError(text).with_traceback(error.__traceback__)
            wrapped.__cause__ = error
            return wrapped
        return error

    def _complete_with(self, errors: list[BaseException]) -> None:
        if self._results and self._claim() and not self._results[0].done():
            self._results[0]._keep_error(errors)
        self._results.clear()


def _has_begun(error: BaseException) -> bool:
    """Returns whether a function has raised an error, as far as that can be told.

    Without memory or room on the stack for its frame, the error comes from what calls it, or from
    its first line. A ``lambda`` has no other line, so it counts as begun.
    """
    if not isinstance(error, (MemoryError, RecursionError)):
        return True
    code, trace = run_interruptibly.__code__, error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    if trace is None or trace.tb_lineno == code.co_firstlineno:  # not even that has begun
        return False
    function = trace.tb_next
    if function is None:
        return False
    code = function.tb_frame.f_code
    return function.tb_lineno != code.co_firstlineno or code.co_name == "<lambda>"
