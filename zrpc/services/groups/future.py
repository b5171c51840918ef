"""The future of a call of a group: one list, made of one future for each member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from typing_extensions import override

from zrpc.calls.future import Future
from zrpc.errors import GroupError
from zrpc.runtime.interrupts import UninterruptedLock, raise_if_of_handler, uninterrupted

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

    __slots__ = ("_left", "_lock", "_names", "_what", "parts")

    def __init__(
        self, parts: Sequence[Future[T]], names: Sequence[str], what: str = "members of the group"
    ) -> None:
        super().__init__()
        self.parts: tuple[Future[T], ...] = tuple(parts)
        self._names = names
        self._what = what
        self._lock = UninterruptedLock()  # guards how many parts are not done
        self._left = len(parts)
        if not parts:
            self.set_result([])
        for part in parts:
            part.add_done_callback(self._on_part_done)

    def _on_part_done(self, _: Any) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        with uninterrupted:  # what a signal handler raises is no member's error
            self._take_outcomes()

    def _take_outcomes(self) -> None:
        """Takes the outcomes of all parts."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        try:
            self._collect(results, errors)
        except Exception as error:  # no memory, perhaps
            errors.append(error.with_traceback(None))
        if self._claim():
            if errors:
                self._keep_error(errors)
            else:
                self._set([*results.values()])

    def _collect(self, results: dict[int, T], errors: list[BaseException]) -> None:
        """Adds the results, by place; and the error, if there is one."""
        failed: dict[int, Exception] = {}
        for place, part in enumerate(self.parts):
            try:
                results[place] = part.value()
            except Exception as error:
                # Neither this frame, nor what this thread handles meanwhile, explains the error.
                failed[place] = error.with_traceback(None)
                # The class of an error may refuse attributes, as frozen dataclasses do.
                BaseException.__setattr__(error, "__suppress_context__", True)
            except BaseException as error:  # the outcome of a test, say
                errors.append(error)
        if failed and not errors:
            errors.append(GroupError.of(failed, results, self._names, self._what))

    @override
    def _summary(self) -> str:
        state = super()._summary()
        of = f"{len(self.parts)} {self._what}"
        return (
            f"{of}, {len(self.parts) - self._left} done" if state == "pending" else f"{of}, {state}"
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
