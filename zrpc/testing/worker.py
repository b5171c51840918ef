"""One worker of a mesh under test, as the test sees it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from zrpc.testing.failure import add_others

__all__ = ["MeshFuture", "Worker", "gather", "name_of", "result", "result_of"]

T = TypeVar("T")

# One worker's failure often makes the others fail: wait this long for their errors.
_OTHER_FAILURES_SECONDS = 1.0


class MeshFuture(Future[T]):
    """A ``concurrent.futures.Future`` that coroutines can await, too. It can't be cancelled."""

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class Worker(ABC):
    """Runs functions one after another, in one thread that is the worker's own.

    Args:
        name: the worker's name in the mesh.
        rank: the worker's rank.

    All methods may be called from any thread. Subclasses decide where the functions run.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        # The lock guards the attributes below; no other lock is taken while it is held.
        self._lock = threading.Lock()
        self._pending: dict[Future[Any], str] = {}
        self._error: BaseException | None = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The worker's name and where it runs, for a reader."""

    @abstractmethod
    def start(self) -> MeshFuture[Any]:
        """Makes the worker join its mesh; the future is done when all workers have joined."""

    @abstractmethod
    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> MeshFuture[Any]:
        """Queues ``fn(*args, **kwargs)``; an error has its remote traceback as cause."""

    @abstractmethod
    def shutdown(self, graceful: bool) -> MeshFuture[list[str]]:
        """Makes the worker leave its mesh; the result lists what it left behind."""

    @property
    def killed(self) -> bool:
        """Whether the test has killed it."""
        return False

    def new_output(self) -> str:
        """Returns what it wrote to stdout and stderr since the last call, if that is kept."""
        return ""

    def ask_for_stacks(self) -> None:  # noqa: B027  (most have nothing to ask for)
        """Makes the worker write its stacks, for `stacks` to read; does not block."""

    @abstractmethod
    def stacks(self) -> str:
        """Returns the stacks of its threads, within a bounded time."""

    @abstractmethod
    def abort(self) -> None:
        """Stops what the worker is doing, by force if possible; does not block."""

    @abstractmethod
    def stop_when_idle(self) -> None:
        """Tells the worker to stop after the work submitted so far; does not block."""

    @abstractmethod
    def close(self, timeout: float) -> list[str]:
        """Waits until the worker, which was told to stop, has; frees its resources.

        Args:
            timeout: seconds to wait; then the worker is stopped by force if possible.

        Returns:
            A description of each thing that the worker left behind.
        """

    def pending_work(self) -> list[str]:
        """Returns the work that it was told to do and has not finished, in order."""
        with self._lock:
            return list(self._pending.values())

    def fail_waits(self, error: BaseException) -> None:
        """Fails all current and later waits for this worker with ``error``."""
        with self._lock:
            self._error = self._error or error
            pending = list(self._pending)
            self._pending.clear()
        for future in pending:
            future.set_exception(error)

    def _new_future(self, what: str) -> MeshFuture[Any]:
        """Returns a new future for a piece of work; it has failed already if none can be done."""
        future: MeshFuture[Any] = MeshFuture()
        future.set_running_or_notify_cancel()  # work that a worker has begun can't be cancelled
        with self._lock:
            error = self._error
            if error is None:
                self._pending[future] = what
        if error is not None:
            future.set_exception(error)
        return future

    def _complete(
        self, future: Future[Any], value: Any = None, error: BaseException | None = None
    ) -> None:
        """Completes a future, unless `fail_waits` came first."""
        with self._lock:
            if self._pending.pop(future, None) is None:
                return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function, for a reader."""
    return str(getattr(fn, "__qualname__", None) or repr(fn))


def result_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a function, or of the coroutine that it makes; runs on the worker."""
    result = fn(*args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def gather(workers: Sequence[Worker], futures: Sequence[Future[T]]) -> list[T]:
    """Returns the results of all futures; raises the first failure, which names the others."""
    __tracebackhide__ = True
    done, rest = wait(futures, return_when=FIRST_EXCEPTION)
    first = next((f for f in futures if f in done and f.exception() is not None), None)
    if first is not None:
        wait(rest, timeout=_OTHER_FAILURES_SECONDS)
        others = {
            worker.label: error
            for worker, future in zip(workers, futures, strict=True)
            if future is not first and future.done() and (error := future.exception())
        }
        error = first.exception()
        assert error is not None  # that is how it was chosen
        raise add_others(error, others)
    return [future.result() for future in futures]


def result(future: Future[T]) -> T:
    """Returns ``future.result()``; an error's traceback shows the worker's frames only."""
    __tracebackhide__ = True
    error = future.exception()
    if error is not None:
        raise error
    return future.result()
