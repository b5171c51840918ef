"""The execution of a function for a caller: a plain one, ``async def``, or one with a future."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from types import CoroutineType
from typing import Any

import torch

from zrpc.calls.cancel_scope import CancelScope, activate, deactivate
from zrpc.calls.current_device import keep_device
from zrpc.calls.result_sink import Called, ResultSink
from zrpc.errors import RpcCancelledError
from zrpc.functions import ASYNC_MARK, DEFERRAL, Deferral
from zrpc.runtime import forks
from zrpc.runtime.event_loop import EventLoop
from zrpc.runtime.torch_modes import reset_modes
from zrpc.wire.message import Message


@dataclass(slots=True, eq=False)
class Execution:
    """One call of a function on behalf of a caller; a job for a thread of the pool.

    Args:
        request: the caller's; nested calls belong to its scope.
        sink: takes the outcome.
        resolve: returns function, args and kwargs; its errors count as the function's.
        loop: runs the coroutine if the function is ``async def``.
        schedule: runs a job in a pool thread. The result of a future or a coroutine is handled
            there: neither the event loop's thread nor the I/O thread may pickle a large result.

    Attributes:
        request: the same.
    """

    request: Message
    _sink: ResultSink
    _resolve: Callable[[], Called]
    _loop: EventLoop
    _schedule: Callable[[Callable[[], None]], None]

    @property
    def useless(self) -> bool:
        """Whether the job has not begun and must not."""
        scope: CancelScope = self.request.scope
        return scope.cancelled and not scope.begun

    def __call__(self) -> None:
        """Calls the function in this thread."""
        request = self.request
        scope: CancelScope = request.scope
        if not scope.begin():
            gone = RpcCancelledError("the caller no longer waits for the answer")
            self._sink.fail(request, gone)
            return
        token = activate(scope)
        generation = forks.generation
        try:
            function, args, kwargs = self._resolve()
            scope.function = function
            deferral = getattr(function, DEFERRAL, None)
            if isinstance(deferral, Deferral):
                self._sink.hand_over(request, self._sink, deferral, (function, args, kwargs))
                return
            result = function(*args, **kwargs)
            if generation != forks.generation:
                forks.exit_child()
            # The shared memory that they hold is returned with the answer.
            del args, kwargs
            if hasattr(function, ASYNC_MARK):
                if self._follow_future(result):
                    return
                result = result.wait()  # and, unlike `value`, for the work on its devices
            elif isinstance(result, CoroutineType):
                try:
                    self._loop.run(self._await(result), contextvars.copy_context())
                except (OSError, RuntimeError):
                    result.close()  # or Python would warn that nobody has awaited it
                    raise
                return
        except BaseException as error:
            if generation != forks.generation:
                forks.exit_child(error)
            # SystemExit and KeyboardInterrupt too: a handler must not end its worker. Removes
            # this frame from the traceback, since it refers to the arguments.
            _cut_frame(error)
            self._sink.fail(request, error)
            return
        finally:
            deactivate(token)
            reset_modes()
        self._sink.answer(request, result)

    def fail(self, error: BaseException) -> None:
        """Tells the sink that the call has failed in code of zrpc, perhaps once more."""
        self._sink.fail(self.request, error)

    def _follow_future(self, result: Any) -> bool:
        """Follows a future, which has the result; returns False if it is done already."""
        if not isinstance(result, torch._C.Future):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {type(result).__name__}"
            )
        if result.done():
            return False
        result.add_done_callback(self._on_done)
        self.request.scope.returned = weakref.ref(result)
        self._sink.defer(self.request)
        return True

    def _on_done(self, done: Any) -> None:
        job = RequestJob(self.request, self._sink.fail, partial(self._finish, done))
        try:
            self._schedule(job)
        except Exception:  # no memory for a frame, perhaps once it was queued: it may run twice
            self._schedule(job)

    def _finish(self, done: Any, request: Message) -> None:
        try:
            value = done.wait()  # as in `__call__`
        except BaseException as error:
            self._sink.fail(request, error)
        else:
            self._sink.answer(request, value)

    async def _await(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Awaits an ``async def`` function. In the event loop's thread."""
        scope: CancelScope = self.request.scope
        generation = forks.generation
        try:
            if not scope.follow(asyncio.current_task()):
                coroutine.close()  # cancelled before it could begin
                raise asyncio.CancelledError
            value = await keep_device(coroutine, self.request)
            if generation != forks.generation:
                forks.exit_child()
        except BaseException as error:
            if generation != forks.generation:
                forks.exit_child(error)
            # SystemExit would end the loop. The caller of a cancelled task needs an answer too.
            work = partial(self._sink.fail, error=error)
            self._schedule(RequestJob(self.request, self._sink.fail, work))
        else:
            work = partial(self._sink.answer, value=value)
            self._schedule(RequestJob(self.request, self._sink.fail, work))
        finally:
            scope.follow(None)  # the task refers to its context, and that to the scope: a cycle


def _cut_frame(error: BaseException) -> None:
    """Removes the first frame from the traceback of an error. Not there, or it would keep it."""
    trace = error.__traceback__  # another thread may change it, if it raises the same error
    error.with_traceback(None if trace is None else trace.tb_next)


@dataclass(slots=True, eq=False)
class RequestJob:
    """A job for a thread of the pool that answers a request without running a user's function.

    Args:
        request: it is accepted already.
        on_error: called with the request and the error, if ``work`` raises one.
        work: answers the request.
    """

    request: Message
    _on_error: Callable[[Message, BaseException], object]
    _work: Callable[[Message], None]

    def __call__(self) -> None:
        """Answers the request in this thread."""
        scope = self.request.scope
        scope.thread = threading.get_ident()
        scope.started = scope.started or monotonic()  # a function with a future began before
        self._work(self.request)

    def fail(self, error: BaseException) -> None:
        """Answers the request with an error of the work."""
        self._on_error(self.request, error)


class ExecutionWithin(Execution):
    """An execution within context managers, which the pool thread makes and enters."""

    __slots__ = ("within",)

    within: list[Callable[[], AbstractContextManager[Any]]]

    def __call__(self) -> None:
        """Calls the function in this thread; the pool calls `fail` with an error of a scope."""
        if not self.within:
            super().__call__()
            return
        with self.within.pop(0)():
            self()
