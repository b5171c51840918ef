"""Defers Ctrl-C for a moment.

Python runs signal handlers in the main thread, between any two of its instructions and inside
calls of ZeroMQ. An exception that a handler raises there (KeyboardInterrupt) would lose a message
that was received and not yet handled.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["hold_interrupts", "release_interrupts", "uninterrupted"]

# The functions of `signal` without its conversion to enums, which takes ten times as long.
_set: Any = _signal.signal
_get: Any = _signal.getsignal

_INTERRUPT = int(signal.SIGINT)
# Signals for which programs set handlers that raise.
_OTHERS = tuple(
    int(getattr(signal, name))
    for name in ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
# These raise nothing, and neither does a handler that is not Python's (None).
_HARMLESS = frozenset((int(signal.SIG_DFL), int(signal.SIG_IGN), None))
_get_ident = threading.get_ident

# The main thread's ident. After a fork, the only thread of the child is its main thread.
_main_ident = threading.main_thread().ident

# State of the main thread only. How often hold_interrupts() is nested (it may send while it
# receives).
_depth = 0
# The handler that is replaced in the meantime: Python's, that of ``asyncio.run``, or the program's.
_saved_handler: Any = None
# Whether Ctrl-C has arrived in the meantime.
_interrupted = False


def hold_interrupts() -> bool:
    """Has no signal raise anything in this thread until `release_interrupts`. May be nested.

    Has no effect outside the main thread, since signals raise nothing there.

    Returns:
        False if the program has its own handlers for other signals than SIGINT. They can't be
        deferred as well, since a signal could arrive while the handlers are being replaced.
    """
    global _depth, _saved_handler, _interrupted
    if _get_ident() != _main_ident:
        return True
    if _depth:
        _depth += 1
        return True
    try:
        # Without a loop, since this is done for each message.
        if not _HARMLESS.issuperset(map(_get, _OTHERS)):
            return False
        handler = _get(_INTERRUPT)
        harmless = handler in _HARMLESS
    except TypeError:  # a handler that can't be hashed is the program's own
        return False
    if not harmless:
        _saved_handler, _interrupted = handler, False
        _set(_INTERRUPT, _record_interrupt)
        _depth = 1
    return True


def release_interrupts() -> None:
    """Undoes the last `hold_interrupts` that returned True.

    Raises:
        KeyboardInterrupt: Ctrl-C has arrived in the meantime. The program's own handler may raise
            something else.
    """
    global _depth, _saved_handler, _interrupted
    if not _depth or _get_ident() != _main_ident:
        return
    _depth -= 1
    if _depth:
        return
    handler, _saved_handler = _saved_handler, None
    _set(_INTERRUPT, handler)
    if _interrupted:  # read when it can no longer change
        _interrupted = False
        # Not by raising the signal again: readers of ``signal.set_wakeup_fd`` would get it twice.
        handler(_INTERRUPT, sys._getframe())


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Has no signal raise anything in this block, if that can be prevented."""
    held = hold_interrupts()
    try:
        yield
    finally:
        if held:
            release_interrupts()


def _record_interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True


def _find_main_thread() -> None:
    global _main_ident
    _main_ident = _get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_find_main_thread)
