"""The newest version of some weights at one worker, and the requests that wait for a newer one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from typing_extensions import override

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
                layout = None if self.known else version.layout
                answer = Answer(version.number, layout, version.flat)
        self.answer.set_result(answer)


class Versions:
    """The newest version, and who waits for a newer one. Any thread may call its methods.

    Attributes:
        newest: the newest version; None if there is none yet, or no longer.
    """

    def __init__(self) -> None:
        # Guards what follows; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self.newest: Version | None = None
        self._waiting: list[_Request] = []
        self._ended = False

    def ask(self, known: int, at_least: int, contents: bool) -> Future[Answer | None]:
        """Returns a future of the newest version, or of None once the publication has ended.

        Args:
            known: the version of this publication that the reader has; 0 if it has none.
            at_least: the answer waits for this version.
            contents: whether the reader needs more than the number.
        """
        request = _Request(known, max(at_least, 1), contents, Future(), current_scope())
        with self._lock:
            newest = self.newest
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
            self.newest = version
            ready = [each for each in self._waiting if each.at_least <= version.number]
            self._waiting = [each for each in self._waiting if each.at_least > version.number]
        _settle(ready, lambda request: request.settle(version))

    def fail(self, error: Exception) -> None:
        """Fails the requests that wait."""
        with self._lock:
            failed, self._waiting = self._waiting, []
        _settle(failed, lambda request: request.answer.set_exception(error))

    def end(self) -> None:
        """Drops the newest version, and has no other."""
        with self._lock:
            self._ended, self.newest = True, None
            left, self._waiting = self._waiting, []
        _settle(left, lambda request: request.settle(None))


def _settle(requests: Iterable[_Request], settle: Callable[[_Request], object]) -> None:
    for request in requests:
        if not request.abandoned:
            with contextlib.suppress(RuntimeError):  # the reader has just stopped waiting
                settle(request)


class HostCopy(Versions):
    """The versions of a publisher on another host, got once for all readers of this host.

    Args:
        fetch: asks the publisher for a version that is at least so new, and returns the answer;
            it is given the number of the version that is here. It may wait.
        keep: copies a version into memory that can be lent.
        submit: has a job done in a thread that may wait.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Answer | None],
        keep: Callable[[torch.Tensor], torch.Tensor],
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__()
        self._fetch, self._keep, self._submit = fetch, keep, submit
        # Guards the flag below; that of the versions may be taken while it is held.
        self._turn = UninterruptedLock()
        self._fetching = False

    @override
    def ask(self, known: int, at_least: int, contents: bool = True) -> Future[Answer | None]:
        answer = super().ask(known, at_least, contents)
        with self._turn:
            begins = not self._fetching and self.waits_for() > 0
            self._fetching |= begins
        if begins:
            self._submit(self._fetch_all)
        return answer

    def _fetch_all(self) -> None:
        """Gets versions until nobody waits for one."""
        while True:
            with self._turn:
                number = self.waits_for()
                self._fetching = number > 0
            if not number:
                return
            newest = self.newest
            try:
                answer = self._fetch(0 if newest is None else newest.number, number)
                if answer is None:
                    self.end()
                elif answer.flat is not None:
                    layout = answer.layout or (newest and newest.layout)
                    assert layout is not None  # it is left out only if there is an earlier version
                    self.put(Version(answer.number, layout, self._keep(answer.flat)))
            except Exception as error:  # the publisher is gone, for example: the readers are told
                self.fail(error)
