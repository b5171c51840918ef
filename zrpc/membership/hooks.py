"""The functions of a program that are called when a worker joins the mesh or is gone."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch.utils.hooks import RemovableHandle

from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.wire.member_id import MemberId

logger = logging.getLogger(__name__)

Hook = Callable[[WorkerInfo], object]


class Hooks:
    """Functions that are called once for each worker that something has happened to.

    Args:
        submit: has a job done in a thread in which user code may run.

    All methods may be called from any thread.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        # Guards what follows, so that no hook misses a worker or gets it twice. A handle removes
        # its hook without the lock: `_run` checks again.
        self._lock = UninterruptedLock()
        self._hooks: OrderedDict[int, Hook] = OrderedDict()
        self._notified: list[WorkerInfo] = []

    def add(self, hook: Hook) -> RemovableHandle:
        """Calls ``hook`` for each worker of earlier `notify` calls, and of later ones.

        Raises:
            TypeError: it can't be called, or nothing would await what it returns.
        """
        if not callable(hook) or inspect.iscoroutinefunction(hook):
            raise TypeError(
                "expected a plain function that takes a WorkerInfo (nothing would await an "
                f"`async def` function), but got {hook!r}"
            )
        with self._lock:
            handle = RemovableHandle(self._hooks)
            self._hooks[handle.id] = hook
            notified = list(self._notified)
        for info in notified:
            self._submit(partial(self._run, handle.id, info))
        return handle

    def notify(self, info: WorkerInfo) -> None:
        """Submits all hooks for a worker; calls none itself."""
        with self._lock:
            self._notified.append(info)
            keys = list(self._hooks)
        for key in keys:
            self._submit(partial(self._run, key, info))

    def forget(self, member: MemberId) -> None:
        """Drops a worker, so that hooks added later are not called for it."""
        with self._lock:
            self._notified = [info for info in self._notified if info.member_id != member]

    def _run(self, key: int, info: WorkerInfo) -> None:
        hook = self._hooks.get(key)
        if hook is None:
            return  # removed meanwhile
        try:
            hook(info)
        except BaseException:  # SystemExit too: the other hooks must be called
            logger.exception("A hook failed that was called for %s: %r", info, hook)
