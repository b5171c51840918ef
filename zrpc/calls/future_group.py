"""Waiting for several futures: `wait_all`, `collect_all` and `as_completed`.

They take zrpc's futures and torch's own, also mixed, and end with the first error. Torch's own
functions do so for torch's futures only: Python code can't tell torch's C++ code of an error.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from operator import length_hint
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, overload

import torch

from zrpc.calls import trampoline
from zrpc.calls.future import Future
from zrpc.calls.future_callback import call_or_repeat
from zrpc.constants import Seconds
from zrpc.errors import RpcTimeoutError
from zrpc.options import checked_timeout
from zrpc.runtime import garbage_collector
from zrpc.runtime.interrupts import run_interruptibly
from zrpc.runtime.thread_pool import waiting

T = TypeVar("T")
# Futures of one type: those of torch, or zrpc's, which can do more. For futures of several types,
# each function has a second signature: of the base class, since mypy takes torch's class for F.
F = TypeVar("F", bound=torch.futures.Future[Any])


@overload
def wait_all(
    futures: Iterable[torch.futures.Future[T]], timeout: Seconds | None = ...
) -> list[T]: ...
@overload
def wait_all(
    futures: Iterable[torch._C.Future[Any]], timeout: Seconds | None = ...
) -> list[Any]: ...
def wait_all(futures: Iterable[Any], timeout: Seconds | None = None) -> list[Any]:
    """Waits for all of some futures and returns their values, in the order of the futures.

    The first error that one of them gets is raised at once, without waiting for the others, whose
    calls go on. If these fail too, that is not logged.

    Args:
        futures: zrpc's or torch's.
        timeout: seconds for all of them; None or 0 for no limit beside the calls' own timeouts.

    Raises:
        RpcTimeoutError: some are not done after ``timeout`` seconds.
        TypeError: one of ``futures`` isn't a future.
        Exception: the first error of a future.

    May be called from any thread. While a handler waits, another one may run in its place.

    Example:
        >>> futures = [rpc_async(f"worker{rank}", pow, args=(rank, 2)) for rank in range(3)]
        >>> wait_all(futures, timeout=10)
        [0, 1, 4]

    See also ``torch.futures.wait_all``.
    """
    futures = list(futures)
    for future in as_completed(futures, timeout):
        try:
            future.wait()
        except BaseException:
            for other in futures:
                other.add_done_callback(_see)
            raise
    return [future.wait() for future in futures]


def _see(future: Any) -> None:
    """Takes the error of a future that somebody has waited for."""
    with contextlib.suppress(Exception):
        future.value()


@overload
def collect_all(futures: Iterable[F]) -> Future[list[F]]: ...
@overload
def collect_all(
    futures: Iterable[torch._C.Future[Any]],
) -> Future[list[torch.futures.Future[Any]]]: ...
def collect_all(futures: Iterable[Any]) -> Future[list[Any]]:
    """Returns a future of the list of these futures, which is done when all of them are.

    The first error that one of them gets completes it at once, with that error.

    Args:
        futures: zrpc's or torch's.

    Raises:
        TypeError: one of ``futures`` isn't a future.

    May be called from any thread.

    Example:
        >>> futures = [rpc_async(f"worker{rank}", pow, args=(rank, 2)) for rank in range(3)]
        >>> collect_all(futures).then(lambda done: sum(f.wait() for f in done.wait())).wait()
        5

    See also ``torch.futures.collect_all``.
    """
    return _Collection(_checked(futures)).result


@overload
def as_completed(futures: Iterable[F], timeout: Seconds | None = ...) -> Iterator[F]: ...
@overload
def as_completed(
    futures: Iterable[torch._C.Future[Any]], timeout: Seconds | None = ...
) -> Iterator[torch.futures.Future[Any]]: ...
def as_completed(futures: Iterable[Any], timeout: Seconds | None = None) -> Iterator[Any]:
    """Returns an iterator over these futures in the order in which they are done.

    Failed futures are among them: ask each for its value.

    Args:
        futures: zrpc's or torch's.
        timeout: seconds from now on for all of them; None or 0 for no limit.

    Raises:
        RpcTimeoutError: by the iterator, if the next one is not done after ``timeout`` seconds.
        TypeError: one of ``futures`` isn't a future.

    May be called from any thread; the iterator is for one thread at a time.

    Example:
        >>> futures = [rpc_async(f"worker{rank}", pow, args=(rank, 2)) for rank in range(3)]
        >>> sorted(future.wait() for future in as_completed(futures))
        [0, 1, 4]
    """
    return Arrivals(_checked(futures), checked_timeout("timeout", timeout or 0))


def _checked(futures: Iterable[Any]) -> list[Any]:
    listed = list(futures)
    for number, future in enumerate(listed):
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"expected torch.futures.Future objects, but got {type(future).__name__} at "
                f"position {number}"
            )
    return listed


class Arrivals(Iterator[Any]):
    """The futures that are done, in that order.

    Args:
        futures: those that it waits for.
        timeout: seconds; 0 means no limit.

    Attributes:
        pending: those that it has not returned.
    """

    def __init__(self, futures: list[Any], timeout: float) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self.pending = dict.fromkeys(futures)
        self._to_take = iter(futures)  # as many as are not in `_taken`, whichever these are
        self._taken: deque[tuple[Any, Any]] = deque()
        # Its `put` needs no memory for a frame: without any, torch would drop the callback.
        self._done: SimpleQueue[Any] = SimpleQueue()
        for future in futures:
            future.add_done_callback(self._done.put)

    def __next__(self) -> Any:
        # In a callback: a job that this thread has postponed may complete one of the futures.
        trampoline.run_postponed(lambda: not self._done.empty())
        if not self._taken:
            if not length_hint(self._to_take):
                raise StopIteration
            self._take()
        future, _ = self._taken.popleft()
        self.pending.pop(future, None)
        return future

    def _take(self) -> None:
        """Waits for the next future that is done, and takes it."""
        if garbage_collector.running:
            garbage_collector.check()
        left = max(0.0, self._deadline - time.monotonic()) if self._timeout else None
        # One step, so that Ctrl-C leaves all others for the next call.
        taken = zip(map(self._done.get, (True,), (left,)), self._to_take, strict=False)
        try:
            with waiting() if self._done.empty() else contextlib.nullcontext():
                run_interruptibly(self._taken.extend, taken)
        except Empty:
            raise RpcTimeoutError(
                f"expected all futures to be done within {self._timeout:g} s, but "
                f"{length_hint(self._to_take)} of them are not: use a longer timeout, or cancel() "
                "them"
            ) from None


class _Collected(Future[list[Any]]):
    """The future of a `collect_all`; its ``parts`` are for what shows what waits for what."""

    __slots__ = ("parts",)

    parts: list[Any]


class _Collection:
    """The futures of a `collect_all`.

    Attributes:
        result: done when all of them are, or one has failed.
    """

    def __init__(self, futures: list[Any]) -> None:
        self.result = _Collected()
        self.result.parts = self._futures = futures
        self._left = {*futures}  # those that are not done: to take one out is atomic
        if not futures:
            self.result.set_result([])
        for future in futures:
            future.add_done_callback(partial(call_or_repeat, self._on_done))

    def _on_done(self, future: Any) -> None:
        errors: list[BaseException] = []
        try:
            future.value()
            self._left.discard(future)
        except BaseException as error:  # SystemExit too: a thread may wait for the result
            errors.append(error)
        if errors or not self._left:
            self.result._complete_by(self.result._claim, self._futures, errors)
