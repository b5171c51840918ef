"""Holding back Ctrl-C for a moment.

Python runs signal handlers in the main thread, between any two of its instructions and inside
of calls of ZeroMQ; what such a handler raises (KeyboardInterrupt) there would lose a message
that was received and not yet looked at.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
from types import FrameType
from typing import Any

__all__ = ["hold_interrupts", "release_interrupts"]

# Python's own functions without the conversion to enums, which takes ten times as long.
_set: Any = _signal.signal
_get: Any = _signal.getsignal

_INTERRUPT = int(signal.SIGINT)
# Signals for which programs set handlers that raise.
_OTHERS = tuple(
    int(getattr(signal, name))
    for name in ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
# These, and a handler that is not Python's, raise nothing.
_HARMLESS = (int(signal.SIG_DFL), int(signal.SIG_IGN), None)

# How many times over the main thread holds Ctrl-C back (it sends while it receives); the handler
# that is put aside meanwhile: Python's, that of ``asyncio.run``, or the program's own; and whether
# one has come. Of that thread only.
_held = 0
_aside: Any = None
_noted = False


def hold_interrupts() -> bool:
    """Has no signal raise anything in this thread until `release_interrupts`.

    In threads other than the main one no signal does anyhow. May be nested.

    Returns:
        False where the program has handlers of its own for other signals than SIGINT. They can't
        be held back as well, since one could come while others are put aside.
    """
    global _held, _aside, _noted
    if threading.get_ident() != threading.main_thread().ident:
        return True
    if _held:
        _held += 1
        return True
    for number in _OTHERS:
        if _get(number) not in _HARMLESS:
            return False
    handler = _get(_INTERRUPT)
    if handler not in _HARMLESS:
        _aside, _noted = handler, False
        _set(_INTERRUPT, _note)
        _held = 1
    return True


def release_interrupts() -> None:
    """Ends what the last `hold_interrupts` that returned True has begun.

    Raises:
        KeyboardInterrupt: Ctrl-C has come meanwhile; or whatever the handler raises for that.
    """
    global _held, _aside, _noted
    if not _held or threading.get_ident() != threading.main_thread().ident:
        return
    _held -= 1
    if _held:
        return
    handler, _aside = _aside, None
    _set(_INTERRUPT, handler)
    if _noted:  # looked at now that it does not change any more
        _noted = False
        # Not by the signal once more, of which also those would hear who listen at a descriptor
        # (``signal.set_wakeup_fd``), a second time.
        handler(_INTERRUPT, sys._getframe())


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    _noted = True
