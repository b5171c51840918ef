"""The calls of a finalizer that the garbage collector runs in the midst of zrpc's own code.

See `zrpc.runtime.garbage_collector`. Another thread makes them, a moment later.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any

from zrpc.calls.future import Future


def call_soon(
    make: Callable[[], Future[Any]],
    in_next_turn: Callable[[Callable[[], object]], None],
    submit: Callable[[Callable[[], None]], None],
) -> Future[Any]:
    """Makes a call in another thread; returns a future of its value.

    Args:
        make: makes the call. It runs in a copy of the present context.
        in_next_turn: calls ``submit`` in the I/O thread; takes no locks.
        submit: has a job done by a thread that may wait.
    """
    future: Future[Any] = Future()
    job = partial(contextvars.copy_context().run, _begin, make, future)
    in_next_turn(partial(submit, job))
    return future


def _begin(make: Callable[[], Future[Any]], future: Future[Any]) -> None:
    try:
        make().add_done_callback(partial(_pass_on, future))
    except Exception as error:
        _complete(future, error, None)


def _pass_on(future: Future[Any], call: Future[Any]) -> None:
    try:
        value = call.value()
    except Exception as error:
        _complete(future, error, None)
    else:
        _complete(future, None, value)


def _complete(future: Future[Any], error: Exception | None, value: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the program has completed or cancelled it
        future.set_result(value) if error is None else future.set_exception(error)
