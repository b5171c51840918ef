"""Runs a workload with locks that note in which order threads take them; prints the order as JSON.

It replaces those of ``threading`` before zrpc is imported, so it needs a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import linecache
import sys
import threading
from functools import partial
from typing import Any

_make, _make_reentrant = threading.Lock, threading.RLock
_held = threading.local()
# A lock that was held, and one that was taken meanwhile.
_orders: set[tuple[str, str]] = set()


class _NotedLock:
    """A lock that notes which others its thread holds."""

    def __init__(self, module: str, lock: Any) -> None:
        self._lock = lock
        self.module = module
        self.locked = getattr(lock, "locked", None)
        self._is_owned = getattr(lock, "_is_owned", self.locked)

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        taken = self._lock.acquire(*args, **kwargs)
        if taken:
            held = _held.__dict__.setdefault("locks", [])
            _orders.update((each.module, self.module) for each in held if each is not self)
            held.append(self)
        return taken

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()

    def release(self) -> None:
        held = _held.__dict__.setdefault("locks", [])
        if self in held:
            held.remove(self)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _make_noted(make: Any = _make) -> Any:
    frame = sys._getframe(1)
    if frame.f_globals["__name__"] == "zrpc.runtime.interrupts" and frame.f_back is not None:
        frame = frame.f_back  # an UninterruptedLock
    module = frame.f_globals["__name__"]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    gate = "gate" in line or ".done" in line  # which another thread releases
    if not module.startswith("zrpc.") or module.startswith("zrpc.testing.") or gate:
        return make()
    return _NotedLock(module, make())


threading.Lock = _make_noted  # type: ignore[assignment, misc]
threading.RLock = partial(_make_noted, _make_reentrant)  # type: ignore[assignment]

import torch  # noqa: E402

import zrpc  # noqa: E402
from tests.support.targets import echo  # noqa: E402
from zrpc.testing import local_mesh  # noqa: E402

LIMIT = 1 << 20


def call_next(value: Any) -> Any:
    return zrpc.rpc_sync((zrpc.get_worker_info().rank + 1) % 3, echo, (value,))


async def echo_later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def call_from_a_coroutine() -> None:
    futures = [zrpc.rpc_async(1, echo, (bytes(LIMIT // 4),)) for _ in range(20)]
    for future in futures:
        await future


def work() -> None:
    for value in (1, torch.ones(4), torch.ones(LIMIT)):
        zrpc.rpc_sync(1, call_next, (value,))
    zrpc.rpc_sync(2, echo_later, (1,))
    futures = [zrpc.rpc_async(1, call_next, (bytes(LIMIT // 4),)) for _ in range(40)]
    futures.pop().cancel()
    zrpc.wait_all([future.then(lambda done: done.wait()) for future in futures])
    rrefs = [zrpc.remote(1, list) for _ in range(5)]
    rrefs[0].rpc_sync().append(zrpc.rpc_sync(2, call_next, (rrefs[1],)))
    with zrpc.autograd.context() as context_id:
        leaf = torch.ones(4, requires_grad=True)
        there = zrpc.rpc_sync(1, torch.mul, (zrpc.rpc_sync(2, torch.mul, (leaf, 2)), 3))
        zrpc.autograd.backward(context_id, [there.sum()])
    asyncio.run(call_from_a_coroutine())


def main() -> None:
    with local_mesh(3, options={"max_bytes_in_flight": LIMIT}) as mesh:
        for future in [mesh.submit(rank, work) for rank in range(3)]:
            future.result(60)
    print(json.dumps(sorted(_orders)))


if __name__ == "__main__":
    main()
