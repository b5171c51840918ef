"""What takes the outcomes of the functions that run for callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from zrpc.functions import Deferral
from zrpc.wire.message import Message

# A function, its args and its kwargs.
Called = tuple[Any, Any, Any]


class ResultSink(Protocol):
    """Takes the outcomes of executions. Any thread may call its methods."""

    def defer(self, request: Message) -> None:
        """Learns that the function returned a future: the result comes later, no thread runs."""

    def hand_over(self, request: Message, first: ResultSink, mark: Deferral, call: Called) -> None:
        """Gives a call of a marked function to a service, which gives ``first`` the outcome."""

    def answer(self, request: Message, value: Any) -> Any:
        """Takes the result: of the function, or of its future or coroutine."""

    def fail(self, request: Message, error: BaseException, report: bool = True) -> None:
        """Takes the error that the execution failed with, and logs it if ``report``."""

    def refuse(self, request: Message, error: BaseException) -> None:
        """Takes the error of a call that never begins."""


S = TypeVar("S", bound=ResultSink)


@dataclass(slots=True, eq=False)
class SinkBefore(Generic[S]):
    """What a sink before another one leaves to that; outcomes are for its subclasses."""

    _sink: S

    def defer(self, request: Message) -> None:
        """See `ResultSink`."""
        self._sink.defer(request)

    def hand_over(self, request: Message, first: ResultSink, mark: Deferral, call: Called) -> None:
        """See `ResultSink`."""
        self._sink.hand_over(request, first, mark, call)

    def refuse(self, request: Message, error: BaseException) -> None:
        """See `ResultSink`."""
        self._sink.refuse(request, error)
