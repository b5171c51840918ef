"""The future of a call of a group: one list, made of one future for each member."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from typing_extensions import override

from zrpc.calls.future import Future
from zrpc.calls.future_callback import call_or_repeat
from zrpc.errors import GroupError
from zrpc.runtime.interrupts import raise_if_of_handler

T = TypeVar("T")


class GroupFuture(Future[list[T]]):
    """The future result of a call of a group: a list, in the order of the group.

    It is done when all its parts are. If some of them have failed, `wait` raises a
    `zrpc.GroupError`. `cancel` cancels all parts.

    Args:
        parts: one future for each member.
        names: what the parts are called, for messages to people.
        what: what all of them are called.

    Attributes:
        parts: the same.
    """

    __slots__ = ("_left", "_names", "_what", "parts")

    def __init__(
        self, parts: Sequence[Future[T]], names: Sequence[str], what: str = "members of the group"
    ) -> None:
        super().__init__()
        self.parts: tuple[Future[T], ...] = tuple(parts)
        self._names = names
        self._what = what
        self._left = {*parts}  # those that are not done: to take one out is atomic
        if not parts:
            self.set_result([])
        for part in parts:
            part.add_done_callback(partial(call_or_repeat, self._on_part_done))

    def _on_part_done(self, part: Future[T]) -> None:
        self._left.discard(part)
        if not self._left:
            results: list[T] = []
            errors: list[BaseException] = []
            self._complete_by(partial(self._collect, results, errors), results, errors)

    def _collect(self, results: list[T], errors: list[BaseException]) -> bool:
        """Adds the results of all parts, or an error, if this thread must complete the future.

        Returns:
            Whether it must.
        """
        if not self._claim():
            return False
        done: dict[int, T] = {}
        failed: dict[int, Exception] = {}
        try:
            for place, part in enumerate(self.parts):
                try:
                    done[place] = part.value()
                except Exception as error:
                    # Neither this frame, nor what this thread handles, explains the error.
                    failed[place] = error.with_traceback(None)
                    # The class of an error may refuse attributes, as frozen dataclasses do.
                    BaseException.__setattr__(error, "__suppress_context__", True)
            if failed:
                errors.append(GroupError.of(failed, done, self._names, self._what))
            results.extend(done.values())
        except BaseException as error:  # the outcome of a test, say, or there is no memory
            errors.append(error.with_traceback(None))
        return True

    @override
    def _summary(self) -> str:
        state = super()._summary()
        of = f"{len(self.parts)} {self._what}"
        return (
            f"{of}, {len(self.parts) - len(self._left)} done"
            if state == "pending"
            else f"{of}, {state}"
        )

    @override
    def wait(self) -> list[T]:
        """Waits for all parts and returns their values; see `zrpc.Future.wait`."""
        if not self.done():
            for part in self.parts:  # so this thread receives the answers itself
                try:
                    part.wait()
                except Exception as error:
                    raise_if_of_handler(error)
        return super().wait()

    @override
    def cancel(self, msg: object = None) -> bool:
        """Cancels the calls of all members that have not answered; see `zrpc.Future.cancel`."""
        cancelled = super().cancel()
        for part in self.parts:
            part.cancel()
        return cancelled

    @override
    def _abandon(self) -> None:
        self.cancel()
