"""One worker of a mesh under test, as the test sees it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

__all__ = ["Worker"]


class Worker(ABC):
    """Runs functions one after another, in one thread that is the worker's own.

    Args:
        name: its name in the mesh.
        rank: its rank.

    All methods may be called from any thread. Subclasses say where the functions run.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        # The lock guards all that follows; no other lock is taken under it.
        self._lock = threading.Lock()
        self._pending: dict[Future[Any], str] = {}
        self._error: BaseException | None = None

    @property
    @abstractmethod
    def label(self) -> str:
        """The worker as a reader knows it: its name and where it runs."""

    @abstractmethod
    def start(self) -> Future[Any]:
        """Has the worker join its mesh; done once all workers have."""

    @abstractmethod
    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        """Has ``fn(*args, **kwargs)`` run; an error comes with its traceback as cause."""

    @abstractmethod
    def shutdown(self, graceful: bool) -> Future[list[str]]:
        """Has the worker leave its mesh; the result lists what it left behind."""

    @property
    def killed(self) -> bool:
        """Whether the test has killed it."""
        return False

    def new_output(self) -> str:
        """What it has written to stdout and stderr since the last call, where that is kept."""
        return ""

    def ask_for_stacks(self) -> None:  # noqa: B027  (most have nothing to ask for)
        """Has the worker write its stacks, for `stacks` to read; does not block."""

    @abstractmethod
    def stacks(self) -> str:
        """The stacks of its threads; bounded in time."""

    @abstractmethod
    def end(self) -> None:
        """Ends what the worker is doing, by force where that is possible; does not block."""

    @abstractmethod
    def dismiss(self) -> None:
        """Tells the worker to end when it has done what it was told before; does not block."""

    @abstractmethod
    def close(self, timeout: float) -> list[str]:
        """Waits for its end, which has been asked for; frees what it holds.

        Args:
            timeout: seconds to wait; then it is ended by force where that is possible.

        Returns:
            What its end has left behind, described.
        """

    def busy(self) -> list[str]:
        """What it was told to do and has not done yet, in order."""
        with self._lock:
            return list(self._pending.values())

    def fail(self, error: BaseException) -> None:
        """Fails all that waits for this worker, now and later, with ``error``."""
        with self._lock:
            self._error = self._error or error
            pending = list(self._pending)
            self._pending.clear()
        for future in pending:
            future.set_exception(error)

    def _enter(self, what: str) -> Future[Any]:
        """A new future for something to be done; failed already where nothing can be."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # what a worker has begun can't be taken back
        with self._lock:
            error = self._error
            if error is None:
                self._pending[future] = what
        if error is not None:
            future.set_exception(error)
        return future

    def _settle(
        self, future: Future[Any], value: Any = None, error: BaseException | None = None
    ) -> None:
        """Completes a future, unless `fail` came first."""
        with self._lock:
            if self._pending.pop(future, None) is None:
                return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def described(fn: Callable[..., Any]) -> str:
    """The name of a function, for a reader."""
    return str(getattr(fn, "__qualname__", None) or repr(fn))
