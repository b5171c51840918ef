"""What programs want called when a worker joins the mesh, or is gone."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch.utils.hooks import RemovableHandle

from zrpc.worker_info import WorkerInfo

__all__ = ["Hook", "Hooks"]

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
        # Guards what follows, so that no hook misses a worker or gets it twice. A handle takes
        # its hook out without the lock: `_run` looks once more.
        self._lock = threading.Lock()
        self._hooks: OrderedDict[int, Hook] = OrderedDict()
        self._told: list[WorkerInfo] = []

    def add(self, hook: Hook) -> RemovableHandle:
        """Has ``hook`` called for each worker that was told of before, and for each to come."""
        with self._lock:
            handle = RemovableHandle(self._hooks)
            self._hooks[handle.id] = hook
            told = list(self._told)
        for info in told:
            self._submit(partial(self._run, handle.id, info))
        return handle

    def tell(self, info: WorkerInfo) -> None:
        """It has happened to this worker; calls no hook itself."""
        with self._lock:
            self._told.append(info)
            keys = list(self._hooks)
        for key in keys:
            self._submit(partial(self._run, key, info))

    def forget(self, number: int) -> None:
        """Hooks that are added later are not told of this worker."""
        with self._lock:
            self._told = [info for info in self._told if info.number != number]

    def _run(self, key: int, info: WorkerInfo) -> None:
        hook = self._hooks.get(key)
        if hook is None:
            return  # removed meanwhile
        try:
            hook(info)
        except BaseException:  # SystemExit too: the other hooks are to be called
            logger.exception("A hook failed that was called for %s: %r", info, hook)
