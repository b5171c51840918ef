"""One worker of a mesh under test, as the test sees it, and the wait for what workers do."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from zrpc.testing.failure import add_others

T = TypeVar("T")


class Work(Future[T]):
    """The future of what a worker was told to do; it can also be awaited.

    Attributes:
        number: for a worker that is a process: how many requests it got before this one.
    """

    number = 0

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class Worker(ABC):
    """Runs functions one after another, in one thread that is the worker's own.

    Args:
        name: the worker's name in the mesh.
        rank: the worker's rank.

    Attributes:
        killed: whether the test has killed it.

    All methods may be called from any thread. Subclasses decide where the functions run.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self.killed = False
        # The lock guards the attributes below; no other lock is taken while it is held.
        self._lock = threading.Lock()
        self._pending: dict[Work[Any], str] = {}
        self._error: BaseException | None = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The worker's name and where it runs, for a reader."""

    @abstractmethod
    def start(self) -> Work[Any]:
        """Makes the worker join its mesh; the future is done when all workers have joined."""

    @abstractmethod
    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Work[Any]:
        """Queues ``fn(*args, **kwargs)``; an error has its remote traceback as cause."""

    @abstractmethod
    def shutdown(self, graceful: bool) -> Work[list[str]]:
        """Makes the worker leave its mesh; the result lists what it left behind."""

    @abstractmethod
    def interrupt(self, work: Work[Any]) -> None:
        """Makes room for other work if a function, whose caller was interrupted, still runs.

        Does nothing if it has ended. If it has not begun, it never will.
        """

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

    def _new_future(self, what: str) -> Work[Any]:
        """Returns a new future for a piece of work; it has failed already if none can be done."""
        future: Work[Any] = Work()
        future.set_running_or_notify_cancel()  # work that a worker has begun can't be cancelled
        with self._lock:
            error = self._error
            if error is None:
                self._pending[future] = what
        if error is not None:
            future.set_exception(error)
        return future

    def _complete(
        self, future: Work[Any], value: Any = None, error: BaseException | None = None
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


# One worker's failure often makes the others fail: wait this long for their errors.
_OTHER_FAILURES_SECONDS = 1.0


def results_of(
    workers: Sequence[Worker], work: Sequence[Work[T]], interrupts: bool = False
) -> list[T]:
    """Returns the results of all; raises the first failure, which names the others.

    Args:
        workers: the workers, in the order of their work.
        work: what they do.
        interrupts: whether the work is interrupted if the wait for it is, as by Ctrl-C.
    """
    __tracebackhide__ = True
    try:
        done, rest = wait(work, return_when=FIRST_EXCEPTION)
    except BaseException:
        for worker, each in zip(workers, work, strict=True):
            if interrupts:
                worker.interrupt(each)
        raise
    first = next((w for w in work if w in done and w.exception() is not None), None)
    if first is not None:
        wait(rest, timeout=_OTHER_FAILURES_SECONDS)
        others = {
            worker.label: error
            for worker, each in zip(workers, work, strict=True)
            if each is not first and each.done() and (error := each.exception())
        }
        error = first.exception()
        assert error is not None  # that is how it was chosen
        raise add_others(error, others)
    return [each.result() for each in work]
