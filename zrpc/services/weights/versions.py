"""The newest version of some weights at one worker, and the requests that wait for a newer one."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from zrpc.calls.cancel_scope import CancelScope, current_scope
from zrpc.calls.future import Future
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.weights.layout import Layout


class Version(NamedTuple):
    """One version: its number, what is where in it, and all its bytes."""

    number: int
    layout: Layout
    flat: torch.Tensor


class Answer(NamedTuple):
    """What a reader gets: the number, and the rest unless it has that version already.

    Without the layout if the reader has another version of the same publication.
    """

    number: int
    layout: Layout | None = None
    flat: torch.Tensor | None = None


class _Request(NamedTuple):
    """What a reader waits for; see `Versions.ask`."""

    known: int
    at_least: int
    contents: bool
    answer: Future[Answer | None]
    scope: CancelScope | None

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the answer any longer."""
        return self.answer.done() or (self.scope is not None and self.scope.cancelled)

    def settle(self, version: Version | None) -> None:
        """Answers with a version, or with None if there will be no other."""
        answer = None
        if version is not None:
            answer = Answer(version.number)
            if self.contents and self.known != version.number:
                answer = Answer(
                    version.number, None if self.known else version.layout, version.flat
                )
        with contextlib.suppress(RuntimeError):  # the reader has just stopped waiting
            self.answer.set_result(answer)


class Versions:
    """The newest version, and who waits for a newer one. Any thread may call its methods."""

    def __init__(self) -> None:
        # Guards what follows; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self._newest: Version | None = None
        self._waiting: list[_Request] = []
        self._ended = False

    @property
    def newest(self) -> Version | None:
        """The newest version; None if there is none yet, or no longer."""
        return self._newest

    def ask(self, known: int, at_least: int, contents: bool) -> Future[Answer | None]:
        """Returns a future of the newest version, or of None once the publication has ended.

        Args:
            known: the version of this publication that the reader has; 0 if it has none.
            at_least: the answer waits for this version.
            contents: whether the reader needs more than the number.
        """
        request = _Request(known, max(at_least, 1), contents, Future(), current_scope())
        with self._lock:
            newest = self._newest
            old = newest is None or newest.number < request.at_least
            waits = old and not self._ended
            if waits:
                # Those that were abandoned are dropped here, which bounds them.
                self._waiting = [each for each in self._waiting if not each.abandoned]
                self._waiting.append(request)
        if not waits:
            request.settle(newest)
        return request.answer

    def waits_for(self) -> int:
        """Returns the highest version that a reader waits for; 0 if none waits."""
        with self._lock:
            return max((each.at_least for each in self._waiting if not each.abandoned), default=0)

    def put(self, version: Version) -> None:
        """Makes a version the newest, and answers those that have waited for it."""
        with self._lock:
            if self._ended:
                return
            self._newest = version
            ready = [each for each in self._waiting if each.at_least <= version.number]
            self._waiting = [each for each in self._waiting if each.at_least > version.number]
        for request in ready:
            if not request.abandoned:
                request.settle(version)

    def fail(self, error: Exception) -> None:
        """Fails the requests that wait."""
        with self._lock:
            failed, self._waiting = self._waiting, []
        for request in failed:
            if not request.abandoned:
                with contextlib.suppress(RuntimeError):  # as above
                    request.answer.set_exception(error)

    def end(self) -> None:
        """Drops the newest version, and has no other."""
        with self._lock:
            self._ended, self._newest = True, None
            left, self._waiting = self._waiting, []
        for request in left:
            if not request.abandoned:
                request.settle(None)
