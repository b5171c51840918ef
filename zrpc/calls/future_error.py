"""The error of a future: kept so that both can be freed, and logged if nobody asks for it."""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from zrpc.errors import NotInitializedError, RemoteError, RpcCancelledError, WorkerDied
from zrpc.wire.exceptions import copied, set_cause, traceback_of

# Users configure this logger by its public name.
logger = logging.getLogger("zrpc.futures")

# The number of entries of a traceback that is soon written down as text.
_SHORT_TRACEBACK = 60
# Errors that are not logged: this worker caused them by shutting down, cancelling, or Ctrl-C.
_EXPECTED = (NotInitializedError, RpcCancelledError, asyncio.CancelledError, KeyboardInterrupt)


class Failure:
    """The error of a future, which is logged at the end if nobody asked for it.

    torch's future calls `raise_it` each time its value is asked for, also on behalf of
    ``torch.futures.wait_all``, and drops this object when it is dropped itself.

    It keeps a function that makes the error instead of the error, for the reason of `KeptError`.

    Args:
        fail: makes the error and raises it.
        for_log: an error with the same text that refers to no frames. ``fail`` is not called for
            the log: it may run user code, and a future may end at any moment, in any thread.
    """

    __slots__ = ("_fail", "_for_log", "seen")

    _last_loss: ClassVar[str] = ""  # that was logged, once for all calls that fail by it

    def __init__(self, fail: Callable[[], Any], for_log: BaseException) -> None:
        self._fail = fail
        self._for_log = for_log
        self.seen = False

    @property
    def name(self) -> str:
        """The name of the error's class."""
        return type(self._for_log).__name__

    def raise_it(self, _: Any) -> None:
        """Raises the error, because its value was asked for."""
        self.seen = True
        self._fail()
        # What could not be unpickled before now can. The future has failed nevertheless: torch
        # would take None for its value.
        raise copied(self._for_log, self._for_log.__cause__)

    def __del__(self) -> None:
        # SystemExit is logged too: it ends nothing in a callback.
        if self.seen or _is_expected(self._for_log):
            return
        if isinstance(self._for_log, WorkerDied):  # as all calls in flight to that worker
            loss = str(self._for_log)
            if loss == Failure._last_loss:
                return
            Failure._last_loss = loss
        logger.error("A call failed, and nobody waited for it", exc_info=self._for_log)


class KeptError:
    """The error of a future, held by a slot of the Python object.

    A raised error refers by its traceback to the frames it passed through and to their callers, and
    these refer to the future: a cycle. So the first who asks for the value gets the error, and it
    is not held any longer. If nobody asks, the garbage collector sees the cycle here. It would not
    if torch's future, a C++ object, held the error.

    The others get copies of the spare, which is a copy of the error without its frames. The C++
    object has it too: it may live longer, in what ``torch.futures.collect_all`` returns.

    Args:
        errors: a list with the error. The thread that completes the future must not refer to the
            error in another way: the one that waits raises it meanwhile, and its variables would
            live as long as that.

    Attributes:
        failure: raises the error, without a strong reference to it.
    """

    __slots__ = ("__weakref__", "_errors", "_spare", "_traceback", "failure")

    def __init__(self, errors: list[BaseException]) -> None:
        [error] = self._errors = errors
        self._traceback = error.__traceback__
        self._spare = copied(error)
        raises = functools.partial(_raise, weakref.ref(self), self._spare)
        self.failure = Failure(raises, self._spare)

    def take(self) -> BaseException | None:
        """Returns the error, as it was, to the first that asks for it; None to all others.

        The spare gets the text of its traceback, unless only copies would show it and it is long: a
        chain of futures would otherwise write down the same frames for each of them.
        """
        try:
            error = self._errors.pop()  # atomic under the interpreter's lock
        except IndexError:
            return None
        error.with_traceback(self._traceback)  # without the frames of where it was raised since
        self._traceback = None
        if self._spare is not error and (not self.failure.seen or _is_short(error)):
            set_cause(self._spare, _Traceback("\n" + traceback_of(error)))
        return error

    def __del__(self) -> None:
        failure = getattr(self, "failure", None)  # not if Ctrl-C came while this was made
        if failure is not None and not failure.seen:
            self.take()  # for the log


def _is_expected(error: BaseException) -> bool:
    """Returns whether an error, or each error of a group, is one that this worker has caused."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(_EXPECTED)[1] is None
    return isinstance(error, _EXPECTED)


def without_frames(error: Exception) -> Exception:
    """Removes the frames from an error that was just raised, and that nobody else has."""
    cause = error.__cause__
    if not isinstance(cause, RemoteError | None):
        cause = _Traceback("\n" + traceback_of(error))
    set_cause(error, cause)
    return error.with_traceback(None)


def _is_short(error: BaseException) -> bool:
    """Returns whether the tracebacks of an error and its causes have few entries."""
    left, cause = _SHORT_TRACEBACK, error
    while True:
        trace = cause.__traceback__
        while trace is not None:
            trace, left = trace.tb_next, left - 1
            if not left:
                return False
        before = cause.__cause__ or cause.__context__
        if before is None:
            return True
        cause, left = before, left - 1
        if left <= 0:
            return False


class _Traceback(Exception):
    """The traceback of an error, as text."""


def _raise(owner: Callable[[], KeptError | None], spare: BaseException) -> NoReturn:
    kept = owner()
    error = None if kept is None else kept.take()
    if error is None:
        error = copied(spare, spare.__cause__).with_traceback(None)
    try:
        raise error
    finally:
        del error  # which refers to this frame
