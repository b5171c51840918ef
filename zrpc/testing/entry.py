"""Where a context manager was entered: a ``with`` statement, or a call of ``__enter__`` by hand."""

from __future__ import annotations

import asyncio
import dis
import inspect
from types import FrameType
from typing import Any

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Entry:
    """The frame that has entered a context manager, and the asyncio task that it was entered in.

    A call that `contextlib` makes counts as that of its caller.

    Args:
        frame: the frame that calls ``__enter__``, in the present thread.
    """

    def __init__(self, frame: FrameType | None) -> None:
        while frame is not None and frame.f_globals.get("__name__") == "contextlib":
            frame = frame.f_back
        assert frame is not None  # something other than contextlib has called it
        self._code = frame.f_code
        # Not the frame itself: it would keep the variables of a function that has returned. But
        # that of a generator is needed, since nothing else finds it while it is suspended.
        self._id = id(frame)
        self._suspended = frame if self._code.co_flags & _SUSPENDED else None
        self._task: asyncio.Task[Any] | None = None
        if self._code.co_flags & _ASYNC and asyncio._get_running_loop() is not None:
            self._task = asyncio.current_task()

    def runs_in(self, frame: FrameType | None) -> bool:
        """Returns whether the frame that has entered is this one, or one of its callers."""
        # An id may be that of a later frame, but hardly of the same code.
        while frame is not None and (id(frame) != self._id or frame.f_code is not self._code):
            frame = frame.f_back
        return frame is not None

    def has_returned(self) -> bool:
        """Returns whether the frame has returned, given that it does not run."""
        frame = self._suspended
        if frame is None:
            return True
        if self._task is not None and self._code.co_flags & inspect.CO_COROUTINE:
            return self._task.done()
        return dis.opname[self._code.co_code[frame.f_lasti]].startswith("RETURN_")

    def cancel_task(self) -> bool:
        """Cancels the coroutine that has entered and is suspended.

        Returns:
            False if there is none: raise an error instead.
        """
        task = self._task
        if task is None or task.done() or asyncio._get_running_loop() is not task.get_loop():
            return False
        if asyncio.current_task() is task:
            return False
        task.get_loop().call_soon_threadsafe(task.cancel)  # wakes the loop too
        return True
