"""Requests to a store: none is waited for beyond a deadline, and nothing is logged.

TCPStore waits for its host's answer in C++, without limit, and past Ctrl-C. A host that is stopped,
or cut off, would hold up all the workers that meet in its store.

A TCPStore that loses its host logs a warning with a stack of thirty C++ frames, beside the error
that it raises. One that can't connect logs such an error. Either is handled, or reported in words
of our own.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

import torch

from zrpc.errors import RendezvousError
from zrpc.membership.launched import stop_error
from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock

T = TypeVar("T")

# Also a request that begins at its deadline has this long: those that find out what is missing do.
_LEAST_SECONDS = 1.0
# How long a thread that is interrupted waits for an answer that is almost there.
_MOMENT_SECONDS = 0.2
# The store is polled with a pause that grows from the first number to the second. Its own wait()
# would be an event to await, but Ctrl-C does not end it, TCPStore logs each timeout of it as a
# network error, and FileStore's polls once a second.
_PAUSE_SECONDS = (0.001, 0.05)
_ERROR, _FATAL = 2, 3  # torch's levels: 0 is INFO, 1 is WARNING

# Guards the number below and the changes of torch's level.
_lock = free_in_child(UninterruptedLock())
_users = 0
_before = 0


def ask(call: Callable[[], T], deadline: float | None, errors: bool = True) -> T:
    """Makes a request to a store in a thread of its own; returns its answer.

    If there is none, that thread stays until the connection to the store breaks, or the process
    ends.

    Args:
        call: makes the request.
        deadline: on the clock of ``time.monotonic``. None stands for no limit; then the present
            thread makes the request.
        errors: whether C++ errors are logged; warnings never are.

    Raises:
        RendezvousError: there is no answer in time.
        Exception: as ``call`` raises it.
    """
    if deadline is None:
        return _call(call, errors)
    begun = time.monotonic()
    answer: Future[T] = Future()
    arguments = (answer, call, errors)
    threading.Thread(target=_answer, args=arguments, name="zrpc-store", daemon=True).start()
    try:
        wait([answer], max(_LEAST_SECONDS, deadline - begun))
    except BaseException:  # Ctrl-C
        wait([answer], _MOMENT_SECONDS)
        raise
    if not answer.done():
        raise RendezvousError(
            "expected the store in which the workers meet to answer, found no answer for "
            f"{time.monotonic() - begun:.1f} s: its host, which is rank 0 or the launcher, is "
            "stopped, or the network to it is cut"
        )
    return answer.result()


def wait_for(
    done: Callable[[], bool],
    deadline: float,
    look: Callable[[], object] = lambda: None,
    look_seconds: float = math.inf,
    longest_pause: float = 0.0,
) -> bool:
    """Waits until ``done()``, and calls ``look()`` now and then; returns False at the deadline.

    Pauses between two polls are not longer than 50 ms, or than ``longest_pause`` if that is more.

    Raises:
        RendezvousError: the launcher stops all workers.
    """
    pause, longest = _PAUSE_SECONDS
    longest = max(longest, longest_pause)
    next_look = time.monotonic() + look_seconds
    while not done():
        if (now := time.monotonic()) > deadline:
            return False
        if (error := stop_error()) is not None:
            raise error
        if now > next_look:
            next_look = now + look_seconds
            look()
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def _answer(answer: Future[T], call: Callable[[], T], errors: bool) -> None:
    try:
        answer.set_result(_call(call, errors))
    except BaseException as error:
        answer.set_exception(error)


def _call(call: Callable[[], T], errors: bool) -> T:
    # In the thread that makes the request: it may log after nobody waits for it any longer.
    with _without_warnings(errors):
        return call()


def _find_level() -> ctypes.c_int | None:
    """Returns torch's own level; None if the user has set one, or this torch keeps it elsewhere."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


_level = _find_level()


@contextlib.contextmanager
def _without_warnings(errors: bool) -> Iterator[None]:
    """Hides C++ warnings of this process during a block, unless ``TORCH_CPP_LOG_LEVEL`` is set.

    Any thread may enter it; the last one that leaves shows warnings again. Hides errors too if
    these are not wanted.
    """
    if _level is None:
        yield
        return
    global _users, _before
    with _lock:
        if not _users:
            _before = _level.value
        _level.value = max(_level.value, _ERROR if errors else _FATAL)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _level.value = _before
