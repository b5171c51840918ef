"""Threads that wait without saying so: they use no processor time, and want none."""

from __future__ import annotations

import threading
from collections.abc import Collection

from zrpc.runtime.run_queue import wants_core
from zrpc.runtime.thread_frames import processor_time_of


class UnseenWaits:
    """Finds threads that seem to have waited from one look to the next. For one thread."""

    def __init__(self) -> None:
        self._used_before: dict[int, float | None] = {}

    def count(self, threads: Collection[int]) -> int:
        """Returns how many of these threads have used no processor time since the last look.

        A thread that has wanted a core and got none does not count.

        Args:
            threads: the idents of the threads.
        """
        used = {ident: processor_time_of(ident) for ident in threads}
        before, self._used_before = self._used_before, used
        waiting = {ident for ident, time in used.items() if before.get(ident, -1.0) == time}
        return len(waiting) and sum(
            each.ident in waiting and not wants_core(each.native_id or 0)
            for each in threading.enumerate()
        )
