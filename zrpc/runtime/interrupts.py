"""Holds back the signal handlers of a program for a moment.

Python runs signal handlers in the main thread, between any two of its instructions and inside
calls of ZeroMQ. An exception that a handler raises there (KeyboardInterrupt) would lose a message
that was received and not yet handled. A call that a handler makes there would wait for a lock that
its own thread holds.

In the meantime, a handler of this module notes which signals arrive.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import repeat
from types import FrameType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

# The functions of `signal` without its conversion to enums, which takes ten times as long.
_set: Any = _signal.signal
_get: Any = _signal.getsignal

_CTRL_C = int(signal.SIGINT)
_ALL = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))

_get_ident = threading.get_ident

# The ident of the main thread, which runs signal handlers. After a fork, the child's only thread is
# its main thread.
main_ident = threading.main_thread().ident

# State of the main thread only. How often hold_interrupts() is nested (it may send while it
# receives).
_depth = 0
# What is replaced in the meantime: the handler of Ctrl-C, which is Python's, that of
# ``asyncio.run`` or the program's; or several, if the program handles other signals too.
_ctrl_c_handler: Any = None
_held: list[tuple[int, Any]] = []
# Which signals have arrived in the meantime, and what handlers have raised while they were
# replaced.
_arrived: set[int] = set()
_raised: list[BaseException] = []


class _Found(NamedTuple):
    """Which signals but Ctrl-C the program handles, and what shows quickly that this is still so.

    Attributes:
        handled: those with a handler of the program's.
        default: those without one; their handlers are false.
        ignored: the others, which the program ignores.
        as_ignored: the handlers of these.
    """

    handled: list[int]
    default: list[int]
    ignored: list[int]
    as_ignored: list[Any]

    @classmethod
    def now(cls) -> _Found:
        """Asks for the handler of each signal."""
        found = [(number, _get(number)) for number in _ALL if number != _CTRL_C]
        ignored = [(number, each) for number, each in found if each and not callable(each)]
        return cls(
            [number for number, each in found if callable(each)],
            [number for number, each in found if not each],
            [number for number, _ in ignored],
            [each for _, each in ignored],
        )


_found = _Found.now()


def hold_interrupts() -> None:
    """Holds back signal handlers in this thread until `release_interrupts`. May be nested.

    Has no effect outside the main thread, since handlers run nowhere else.
    """
    global _depth, _ctrl_c_handler, _held, _found
    if _get_ident() != main_ident:
        return
    if _depth:
        _depth += 1
        return
    while not _depth:
        try:
            handled, default, ignored, as_ignored = _found
            if (
                any(map(_get, default))
                or [*map(_get, ignored)] != as_ignored
                or (handled and not all(map(callable, map(_get, handled))))
            ):
                _found = _Found.now()
                continue
            if handled:
                _held = _replace([*handled, _CTRL_C] if callable(_get(_CTRL_C)) else handled)
            elif callable(_get(_CTRL_C)):
                _ctrl_c_handler = _set(_CTRL_C, _note)
            _depth = 1
        except RecursionError:  # of this thread's own depth: it would come again and again
            raise
        except BaseException as error:
            _raised.append(error)


def release_interrupts(*_: object) -> None:
    """Undoes the last `hold_interrupts`, and runs the handlers of the signals that have arrived.

    Args:
        _: of the end of a block, which has no other function: near the recursion limit, a block
            that could begin must be able to end.

    Raises:
        KeyboardInterrupt: Ctrl-C has arrived in the meantime. The program's own handlers may raise
            something else.
    """
    global _depth, _ctrl_c_handler, _held
    if not _depth or _get_ident() != main_ident:
        return
    _depth -= 1
    if _depth:
        return
    if _held:
        held, _held = _held, []
        try:
            _put_back(held)
        except RecursionError:  # a frame further up puts them back
            _held, _depth = held, 1
            raise
    elif _ctrl_c_handler is not None:
        handler, _ctrl_c_handler = _ctrl_c_handler, None
        if _get(_CTRL_C) is _note:  # and the program has not set another one meanwhile
            _set(_CTRL_C, handler)
    if _arrived or _raised:
        _run_arrived([number for number in _ALL if number in _arrived])


def in_main_thread() -> bool:
    """Returns whether this is the main thread, in which signal handlers run."""
    return _get_ident() == main_ident


def run_interruptibly(function: Callable[..., T], *args: Any) -> T:
    """Calls a function that may take long; meanwhile signal handlers run, even if they are held.

    Raises:
        KeyboardInterrupt: as `release_interrupts`.
    """
    global _depth
    depth = _depth if _get_ident() == main_ident else 0
    if not depth:
        return function(*args)
    try:
        _depth = 1
        release_interrupts()
        return function(*args)
    finally:
        hold_interrupts()
        _depth = depth


def pass_interruptibly(gate: threading.Lock, timeout: float) -> bool:
    """Waits until a gate is open, which stays open; meanwhile signal handlers run.

    Returns:
        False if the timeout, in seconds, passed first; a negative one means no limit.
    """
    return run_interruptibly(_pass, gate, timeout)


def _pass(gate: threading.Lock, timeout: float) -> bool:
    # In one instruction of Python's: after an acquisition of its own, a signal handler might raise,
    # and the gate would stay closed; or the handler might wait for the same gate.
    acquire = functools.partial(gate.acquire, True, timeout)
    return any(zip(iter(acquire, False), iter(gate.release, False), strict=False))


def raised_by_handler(error: BaseException) -> bool:
    """Returns whether a signal handler of the program has raised an error in this thread.

    It is not one of what the handler has interrupted. So it passes through unchanged.
    """
    if _get_ident() != main_ident:
        return False
    handlers = [*map(_get, _ALL), _ctrl_c_handler, *(handler for _, handler in _held)]
    codes = {_code_of(handler) for handler in filter(callable, handlers)}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


def raise_if_of_handler(error: BaseException) -> None:
    """Raises an error again if a signal handler of the program has raised it."""
    if raised_by_handler(error):
        raise error


class suppressing(contextlib.suppress):
    """Suppresses errors of some types in a block, but none that a signal handler has raised."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        handled = error is not None and raised_by_handler(error)
        return not handled and bool(super().__exit__(kind, error, trace))


def _code_of(handler: Any) -> Any:
    """Returns the code of a handler: a function, a method, a partial or an object; else None."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    own = getattr(handler, "__code__", None)
    return own or getattr(type(handler).__call__, "__code__", None)


class _Uninterrupted:
    """Holds back signal handlers in a block, as `hold_interrupts`."""

    __enter__ = staticmethod(hold_interrupts)
    __exit__ = staticmethod(release_interrupts)


uninterrupted = _Uninterrupted()


class UninterruptedLock:
    """A lock whose holder runs no signal handler, which might make a call that needs the lock.

    Locks that each call takes are of the quicker kind, and callers hold back handlers themselves.

    Args:
        lock: an ``RLock``, if the holder may take it again; by default it may not.
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or threading.Lock()

    def __enter__(self) -> None:
        if _get_ident() == main_ident:
            hold_interrupts()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if _depth:
            release_interrupts()

    def _at_fork_reinit(self) -> None:
        """Frees it in a forked child, as a lock of Python's."""
        lock: Any = self._lock
        lock._at_fork_reinit()


def _note(number: int, frame: FrameType | None) -> None:
    _arrived.add(number)


def _replace(numbers: list[int]) -> list[tuple[int, Any]]:
    """Replaces the handlers of some signals; returns the signals and these handlers."""
    handlers: list[Any] = []
    try:
        # Without an instruction of Python's between two of them, at which a handler that is not
        # replaced yet might raise, or set another one.
        handlers.extend(map(_set, numbers, repeat(_note)))
    except BaseException:
        _put_back(list(zip(numbers, handlers, strict=False)))
        raise
    return list(zip(numbers, handlers, strict=True))


def _put_back(held: list[tuple[int, Any]]) -> None:
    """Puts handlers back. What they raise meanwhile is kept."""
    while held:
        try:
            while held:
                number, handler = held[-1]
                if _get(number) is _note:
                    _set(number, handler)
                held.pop()
        except RecursionError:
            raise
        except BaseException as error:
            _raised.append(error)


def _run_arrived(numbers: list[int]) -> None:
    """Runs the handlers of signals that have arrived, and raises what handlers raise."""
    try:
        while numbers:
            number = numbers.pop(0)
            handler = _get(number)
            # A handler has held back signals itself, and so run the others; or it has interrupted a
            # `hold_interrupts`, which has replaced this one.
            if number not in _arrived or handler is _note:
                continue
            _arrived.discard(number)
            # Not by raising the signal again: readers of ``signal.set_wakeup_fd`` would get it
            # twice. It reaches no handler but the system's if the program has removed its own.
            if callable(handler):
                handler(number, sys._getframe(2))
            elif handler == signal.SIG_DFL:
                _signal.raise_signal(number)
    finally:
        if numbers:
            _run_arrived(numbers)
        if _raised:
            raise _raised.pop(0)


def _after_fork() -> None:
    global main_ident, _depth
    main_ident = _get_ident()
    # The thread that was the main one may have held handlers back; it does not exist any longer.
    _arrived.clear()
    if _depth:
        _depth = 1
        release_interrupts()


os.register_at_fork(after_in_child=_after_fork)
