"""The future of a call in asyncio.

A future that is done is taken for one of asyncio's own, so that ``asyncio.wait_for(future, 0)``
returns its value. For any other, asyncio makes a task that awaits it.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from zrpc.calls.taking import Taking
from zrpc.runtime.event_loop import running_loop

PENDING = "expected a future that is done, found a pending one: await it, or call its method wait()"

T = TypeVar("T")


class AsyncioFuture(Generic[T]):
    """What asyncio asks of a future. Its methods are for the thread of an event loop."""

    __slots__ = ()

    _cancelled: bool

    @abstractmethod
    def value(self) -> T:
        """Returns the value, or raises the error."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether there is a value or an error."""

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
        """Cancels the call that the future stands for, if there is one.

        If that has failed at the same moment, a task has waited for its error.
        """

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
        if self._is_complete():  # since then
            if taking is not None:
                taking.end(True)
            return self.value()
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
        """Returns the value, or raises the error; see `_check_done`.

        :meta private:
        """
        self._check_done()
        return self.value()

    def exception(self) -> BaseException | None:
        """Returns the error, or None; see `_check_done`.

        :meta private:
        """
        self._check_done()
        try:
            self.value()
        except StopIteration as error:  # asyncio's futures refuse it
            wrapped = RuntimeError("the call raised StopIteration")
            wrapped.__cause__ = error
            return wrapped
        except BaseException as error:
            return error
        return None

    def _check_done(self) -> None:
        """Raises asyncio's InvalidStateError if the future is pending, as asyncio's futures do."""
        if not self.done():
            raise asyncio.InvalidStateError(PENDING)

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
