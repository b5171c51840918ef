"""Stream: what a program holds of a generator that runs on another worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic
from typing import Any, Generic, NoReturn, TypeVar

from zrpc.errors import RpcError
from zrpc.runtime import garbage_collector
from zrpc.services.streams.source import Source

R = TypeVar("R")


class Stream(Generic[R]):
    """The items of a generator on another worker, as they come; `zrpc.rpc_stream` returns it.

    Read it by ``for``, ``async for`` or ``next``. The generator runs ahead of its reader by a
    limited number of items, and rests in between. It is closed, so that its ``finally`` runs, when

    - the reader leaves the loop, or the ``with`` or ``async with`` block of the stream;
    - `close` is called, or nothing refers to the stream any longer;
    - the next item takes longer than the timeout;
    - this worker dies, or all workers have called `zrpc.shutdown`.

    The stream of a group's generators has their items as they come, each with its place.

    If the generator fails, or its worker dies, you get the items before that, and then the error.
    Any thread may call the methods. Several threads may read one stream; each item goes to one of
    them. A Stream can't be pickled.

    Example:
        >>> def squares(n):
        ...     for number in range(n):
        ...         yield number * number
        >>> with rpc_stream("worker1", squares, args=(4,)) as stream:
        ...     next(stream), list(stream)
        (0, [1, 4, 9])
    """

    __slots__ = ("__weakref__", "_drop", "_source", "_take")

    def __init__(self, source: Source, drop: Callable[[Source], None]) -> None:
        self._drop = drop
        self._take: Callable[[], R] = source.items.popleft
        self._source = source

    @property
    def source(self) -> Source:
        """What it takes its items from.

        :meta private:
        """
        return self._source

    def __next__(self) -> R:
        while True:
            try:
                return self._take()
            except IndexError:
                pass  # what follows is no part of this error
            self._source.fill()

    def __iter__(self) -> Iterator[R]:
        """Yields the items, and closes the stream when the loop is left."""
        take, fill = self._take, self._source.fill
        try:
            while True:
                try:
                    yield take()
                    continue
                except IndexError:
                    pass
                try:
                    fill()
                except StopIteration:
                    return
        finally:
            self.close()

    async def __anext__(self) -> R:
        source = self._source
        if monotonic() > source.turn_at:
            await source.give_turn()
        while True:
            try:
                return self._take()
            except IndexError:
                pass
            await source.fill_async()

    def __aiter__(self) -> AsyncIterator[R]:
        """Returns an iterator that closes the stream when it is dropped."""
        return _AsyncLoop(self)

    def close(self) -> None:
        """Ends the stream: the generator is closed after the step that runs. Idempotent.

        It does not wait for that. Items that were not read are dropped.

        Example:
            >>> def numbers():
            ...     yield from range(10**9)
            >>> stream = rpc_stream("worker1", numbers)
            >>> next(stream), stream.close(), list(stream)
            (0, None, [])
        """
        if garbage_collector.running and garbage_collector.interrupts_zrpc():
            self._drop(self._source)
        else:
            self._source.close()

    async def aclose(self) -> None:
        """Ends the stream as `close` does; for ``contextlib.aclosing``."""
        self.close()

    def __enter__(self) -> Stream[R]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream[R]:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Only notes it, as this may be in the midst of anything. Not if it was never filled.
        source = getattr(self, "_source", None)
        if source is not None:
            self._drop(source)

    def __repr__(self) -> str:
        return f"Stream({self._source.title})"

    def __reduce__(self) -> NoReturn:
        raise RpcError(
            f"{self!r} can't be sent: read it here and send its items, or let the other worker "
            "call rpc_stream itself"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__reduce__()


class _AsyncLoop(Generic[R]):
    """One ``async for`` over a stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream[R]) -> None:
        self._stream = stream

    def __aiter__(self) -> _AsyncLoop[R]:
        return self

    async def __anext__(self) -> R:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None:
            stream.close()
