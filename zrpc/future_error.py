"""How a future keeps its error: so that both are freed, and that no error gets lost unseen."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from zrpc.errors import NotInitializedError, RemoteError, RpcCancelledError

__all__ = ["Failure", "KeptError", "without_frames"]

# That of the futures, where users of zrpc look for it.
logger = logging.getLogger("zrpc.futures")


_EXPECTED = (NotInitializedError, RpcCancelledError, asyncio.CancelledError, KeyboardInterrupt)


class Failure:
    """The error of a future, which tells in the log where nobody ever asked for it.

    torch's future calls `raise_it` wherever its value is asked for, also on behalf of
    ``torch.futures.wait_all``, and drops it when it is dropped itself.

    It keeps the way to make the error and not the error, for the reason of `KeptError`.

    Args:
        fail: makes the error and raises it.
        for_log: an error that says the same and refers to no frames. To make one anew might run
            what a user wrote, which must not be at the end of a future: that comes at any moment,
            in any thread.
    """

    __slots__ = ("_fail", "_for_log", "_seen")

    def __init__(self, fail: Callable[[], Any], for_log: BaseException) -> None:
        self._fail = fail
        self._for_log = for_log
        self._seen = False

    def raise_it(self, _: Any) -> None:
        """Raises it, to somebody who has asked for the value."""
        self._seen = True
        self._fail()

    def __del__(self) -> None:
        # Where this worker has shut down, or wanted it so, nobody needs to be told.
        if not (self._seen or isinstance(self._for_log, _EXPECTED)):
            # Also of what a callback has raised, in which SystemExit ends nothing.
            logger.error("A call failed, and nobody waited for it", exc_info=self._for_log)


class KeptError:
    """An error that a future has got, in a slot of that.

    A raised error refers by its traceback to the frames that it has gone through, with those that
    had called them, and these to the future. Here the garbage collector sees the cycle. It would
    not where torch's future, an object of C++, held the error.

    That one may live longer, in what ``torch.futures.collect_all`` returns, and has the `spare`.
    """

    __slots__ = ("__weakref__", "_seen", "_traceback", "error", "spare")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.spare = _copied(error)
        self._traceback = error.__traceback__
        self._seen = False

    def way(self) -> Callable[[], NoReturn]:
        """What raises it, without keeping it."""
        return functools.partial(_raise, weakref.ref(self), self.spare)

    def raise_it(self) -> NoReturn:
        """Raises it, without the frames of those who have had it raised before."""
        self._seen = True
        raise self.error.with_traceback(self._traceback)

    def __del__(self) -> None:
        if not self._seen and self.spare is not self.error:
            where = traceback.format_exception(self.error.with_traceback(self._traceback))
            self.spare.__cause__ = _Traceback("\n" + "".join(where))


def without_frames(error: Exception) -> Exception:
    """An error that was just raised and that nobody else has, without its frames."""
    if not isinstance(error.__cause__, RemoteError | None):
        error.__cause__ = _Traceback("\n" + "".join(traceback.format_exception(error)))
    error.__context__ = None
    return error.with_traceback(None)


class _Traceback(Exception):
    """Where an error came from, as text."""


def _raise(owner: Callable[[], KeptError | None], spare: BaseException) -> NoReturn:
    kept = owner()
    if kept is not None:
        kept.raise_it()
    copied = _copied(spare)
    if copied is not spare:
        copied.__cause__ = spare.__cause__
    raise copied


def _copied(error: BaseException) -> BaseException:
    """A copy without traceback and cause, or the error itself where it can't be copied."""
    for copied_by in (copy.copy, _bare_copy):
        # By the first it is made anew from its args, which need not fit its __init__.
        with contextlib.suppress(Exception):
            copied = copied_by(error)
            if type(copied) is type(error) and str(copied) == str(error):
                return copied
    return error


def _bare_copy(error: BaseException) -> BaseException:
    """A copy that is made without its ``__init__``."""
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    return copied
