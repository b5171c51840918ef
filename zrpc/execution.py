"""Running what a caller asked for, whichever way the function gives its result."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import CoroutineType
from typing import Any, Protocol

import torch

from zrpc.cancel_scope import CancelScope, activate, deactivate
from zrpc.errors import RpcCancelledError
from zrpc.event_loop import EventLoop
from zrpc.functions import is_async_execution
from zrpc.wire.header import Message

__all__ = ["Execution", "ExecutionWithin"]


class Outlet(Protocol):
    """Takes the outcome of an execution, in whichever thread has it.

    Attributes:
        request: what asked for the execution.
    """

    @property
    def request(self) -> Message: ...

    def later(self) -> None:
        """The function has returned a future, and nothing of it runs in a thread."""

    def value(self, value: Any) -> None:
        """The function has returned, or its future or coroutine has a result."""

    def error(self, error: BaseException) -> None:
        """It has failed."""


class Execution:
    """One call of a function on behalf of a caller; a job for a thread of the pool.

    Args:
        outlet: takes the outcome.
        loop: runs the coroutine where the function is ``async def``.
        schedule: has a job done in a pool thread. What is left to do when a future or a
            coroutine ends is done there: the event loop's thread must not pickle a large
            result, nor the I/O thread.
        scope: of the request; nested calls belong to it.
        resolve: gives function, args and kwargs; it may raise, as the function may.
    """

    __slots__ = ("_loop", "_outlet", "_resolve", "_schedule", "_scope")

    def __init__(
        self,
        outlet: Outlet,
        loop: EventLoop,
        schedule: Callable[[Callable[[], None]], None],
        scope: CancelScope,
        resolve: Callable[[], tuple[Any, Any, Any]],
    ) -> None:
        self._outlet = outlet
        self._loop = loop
        self._schedule = schedule
        self._scope = scope
        self._resolve = resolve

    @property
    def request(self) -> Message:
        """What asked for it."""
        return self._outlet.request

    @property
    def useless(self) -> bool:
        """Whether the job has not begun and need not."""
        return self._scope.cancelled and not self._scope.begun

    def __call__(self) -> None:
        """Calls the function in this thread."""
        if not self._scope.begin():
            self._outlet.error(RpcCancelledError("nobody waits for the answer any more"))
            return
        token = activate(self._scope)
        try:
            function, args, kwargs = self._resolve()
            result = function(*args, **kwargs)
            # What they hold of shared memory goes back with the answer.
            del args, kwargs
            if is_async_execution(function):
                self._follow_future(result)
                return
            if isinstance(result, CoroutineType):
                self._loop.run(self._await(result), contextvars.copy_context())
                return
        except BaseException as error:
            # SystemExit and KeyboardInterrupt too: a handler does not end its worker. The
            # traceback goes on without this frame, which refers to the arguments.
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            self._outlet.error(error)
            return
        finally:
            deactivate(token)
        self._outlet.value(result)

    def _follow_future(self, result: Any) -> None:
        if not isinstance(result, torch._C.Future):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {type(result).__name__}"
            )
        result.add_done_callback(lambda done: self._schedule(partial(self._finish, done)))
        self._outlet.later()

    def _finish(self, done: Any) -> None:
        try:
            value = done.value()
        except BaseException as error:
            self._outlet.error(error)
        else:
            self._outlet.value(value)

    async def _await(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """In the event loop's thread: the outcome of an ``async def`` function."""
        scope = self._scope
        try:
            if not scope.follow(asyncio.current_task()):
                coroutine.close()  # cancelled before it could begin
                raise asyncio.CancelledError
            value = await coroutine
        except BaseException as error:
            # SystemExit would end the loop; of a cancelled task the caller must hear too.
            self._schedule(partial(self._outlet.error, error))
        else:
            self._schedule(partial(self._outlet.value, value))
        finally:
            scope.follow(None)  # which refers to the context, and that to the scope


class ExecutionWithin(Execution):
    """An execution within context managers, which are made and entered in the pool thread."""

    __slots__ = ("within",)

    within: Sequence[Callable[[], AbstractContextManager[Any]]]

    def __call__(self) -> None:
        """Calls the function in this thread."""
        with ExitStack() as stack:
            for enter in self.within:
                stack.enter_context(enter())
            super().__call__()
