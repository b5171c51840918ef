"""The versions of a publisher on another host, which one worker gets for all of its own host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zrpc.calls.future import Future
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.weights.versions import Answer, Version, Versions


class HostCopy:
    """Gets a version once, however many readers on this host ask for it.

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
        self._fetch, self._keep, self._submit = fetch, keep, submit
        self.versions = Versions()
        # Guards the flag below; that of the versions may be taken while it is held.
        self._lock = UninterruptedLock()
        self._fetching = False

    def ask(self, known: int, number: int) -> Future[Answer | None]:
        """Returns a future of a version; see `Versions.ask`.

        Args:
            known: the version that the reader has.
            number: at least this version, which the publisher has pushed already.
        """
        answer = self.versions.ask(known, number, contents=True)
        with self._lock:
            begins = not self._fetching and self.versions.waits_for() > 0
            self._fetching |= begins
        if begins:
            self._submit(self._fetch_all)
        return answer

    def _fetch_all(self) -> None:
        """Gets versions until nobody waits for one."""
        versions = self.versions
        while True:
            with self._lock:
                number = versions.waits_for()
                self._fetching = number > 0
            if not number:
                return
            newest = versions.newest
            try:
                answer = self._fetch(0 if newest is None else newest.number, number)
                if answer is None:
                    versions.end()
                elif answer.flat is not None:
                    layout = answer.layout or (newest and newest.layout)
                    assert layout is not None  # it is left out only if there is an earlier version
                    versions.put(Version(answer.number, layout, self._keep(answer.flat)))
            except Exception as error:  # the publisher is gone, for example: the readers are told
                versions.fail(error)
