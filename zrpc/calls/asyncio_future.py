"""The future of a call in asyncio.

A future that is done is taken for one of asyncio's own, so that ``asyncio.wait_for(future, 0)``
returns its value. For any other, asyncio makes a task that awaits it.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from zrpc.runtime.event_loop import running_loop

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Taking:
    """Whether tasks have taken the value of a call that they await; told once, if it is asked for.

    A task may be cancelled when the value has come, but the task has not gone on with it yet.

    Attributes:
        tasks: those that await it.
    """

    tasks: int = 0
    _taken: bool | None = None
    _tell: list[Callable[[bool], None]] = field(default_factory=list)

    def ask(self, tell: Callable[[bool], None]) -> None:
        """Passes the answer to ``tell`` once it is known; the value has come. In the I/O thread."""
        self._tell.append(tell)
        self._answer()

    def end(self, taken: bool) -> None:
        """Notes that a task awaits the value no longer."""
        self.tasks -= 1
        if self._taken is None and (taken or not self.tasks):
            self._taken = taken
            self._answer()

    def _answer(self) -> None:
        if self._taken is not None:
            with contextlib.suppress(IndexError):  # another thread has told it
                self._tell.pop()(self._taken)


class AsyncioFuture(Generic[T]):
    """What asyncio asks of a future. Its methods are for the thread of an event loop."""

    __slots__ = ()

    _cancelled: bool

    @abstractmethod
    def value(self) -> T:
        """Returns the value, or raises the error."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls ``callback(self)`` once the future is done."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Returns whether there is a value or an error; makes neither from an answer."""

    @abstractmethod
    def _begin_taking(self) -> Taking | None:
        """Notes that a task awaits the value, if the future stands for a call."""

    @abstractmethod
    def _leave(self, taking: Taking | None) -> None:
        """Notes that a task takes no value. May run in a finalizer."""

    @abstractmethod
    def _abandon(self) -> None:
        """Cancels the call that the future stands for, if there is one."""

    def __await__(self) -> Generator[Any, None, T]:
        if self._cancelled or self._is_complete():
            return self.value()
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def on_done(future: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrive)

        taking = self._begin_taking()
        self.add_done_callback(on_done)
        try:
            yield from arrived
        except BaseException as error:
            self._leave(taking)
            if isinstance(error, asyncio.CancelledError):
                self._abandon()
            raise
        if taking is not None:
            taking.end(True)
        return self.value()

    @property
    def _asyncio_future_blocking(self) -> bool | None:
        """What asyncio looks at: not None if this is one of its futures.

        Not one that was cancelled: asyncio would raise an error of its own, which would cancel the
        task that waits.
        """
        own = self._is_complete() and not self._cancelled and running_loop() is not None
        return False if own else None

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Returns the loop that asks: a value belongs to any.

        :meta private:
        """
        return asyncio.get_running_loop()

    def result(self) -> T:
        """Returns the value, or raises the error.

        :meta private:
        """
        return self.value()

    def exception(self) -> BaseException | None:
        """Returns the error, or None.

        :meta private:
        """
        try:
            self.value()
        except BaseException as error:
            return error
        return None

    def remove_done_callback(self, callback: Callable[[Any], None]) -> int:
        """Returns that no callback was removed: all that asyncio adds are about to run.

        :meta private:
        """
        return 0

    def _call_soon(self, callback: Callable[[Any], object]) -> None:
        """Calls a function of asyncio's own in the next turn of the loop, as asyncio's futures do.

        Raises:
            TypeError: the future is not done. Another thread would call the function then, and not
                wake the loop.
        """
        if self._asyncio_future_blocking is None:
            raise TypeError("asyncio.wait takes futures of asyncio: give it ensure_future(future)")
        asyncio.get_running_loop().call_soon(callback, self)
