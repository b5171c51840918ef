"""A torch future whose callbacks are kept in Python.

torch's own list of callbacks is an object of C++, which the garbage collector can't look into: a
future that is never completed would never be freed, nor would its callbacks. And torch drops a
callback that it can't begin. So it only says whose turn it is.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch

from zrpc.calls import trampoline
from zrpc.calls.future_callback import Callback
from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock, uninterrupted

T = TypeVar("T")

# Held while the list of a future's callbacks is made. No other lock is taken meanwhile.
_first_callback = free_in_child(UninterruptedLock())


class TorchFuture(torch.futures.Future[T]):
    """Runs its callbacks, each once. Any thread may call its methods.

    Callbacks run in their order, among those of ``torch.futures.collect_all``.
    """

    __slots__ = ("_callbacks",)

    def __init__(self, *, devices: list[Any] | None = None) -> None:
        super().__init__(devices=devices)
        # Those to come; a list as soon as there is one. Single operations on it are atomic.
        self._callbacks: list[Callback] | None = None

    def _set_and_call_back(self, result: T) -> None:
        """Completes the future, and runs its callbacks."""
        try:
            if self._callbacks:
                with uninterrupted:  # see `trampoline.run`
                    trampoline.with_room(super().set_result, result)
            else:
                super().set_result(result)
        finally:
            if self._callbacks:
                self._run_dropped()
        if trampoline.interrupts:
            trampoline.raise_interrupt()

    def _add(self, callback: Callback) -> None:
        """Adds a callback. If the future is done, its result exists afterwards."""
        with uninterrupted:  # see `trampoline.run`
            if super().done():
                # By torch too, which lets it wait for the streams of devices.
                alone = [callback]
                run = functools.partial(_run_first, alone, at_once=True)
                trampoline.with_room(super().add_done_callback, run)
                _run_first(alone, at_once=True)  # if torch has dropped it
            else:
                self._list(callback)
                trampoline.with_room(super().add_done_callback, TorchFuture._run_next)
        if self._callbacks and super().done():
            self._run_dropped()
        if trampoline.interrupts:
            trampoline.raise_interrupt()

    def _list(self, callback: Callback) -> None:
        if self._callbacks is None:
            with _first_callback:
                self._callbacks = self._callbacks or []
        self._callbacks.append(callback)

    def _run_next(self) -> None:
        if self._callbacks:
            _run_first(self._callbacks)

    def _run_dropped(self) -> None:
        """Runs the callbacks that torch has dropped: for one, it had no memory for a frame."""
        with uninterrupted:
            while self._callbacks and super().done():
                _run_first(self._callbacks)


def _run_first(callbacks: list[Callback], _: Any = None, at_once: bool = False) -> None:
    """Runs the callback that was added first, unless another thread has begun to."""
    try:
        callback = callbacks.pop(0)
    except IndexError:
        return
    try:
        trampoline.run(callback, at_once)
    except BaseException as error:  # no memory for its frame, for example
        trampoline.fail(callback, error)
