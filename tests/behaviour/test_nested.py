"""Handlers that call, and wait, at any depth and with few threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.targets import echo
from tests.support.waiting import SOON
from zrpc.functions import async_execution
from zrpc.testing import Mesh


def other() -> int:
    return 1 - rpc.get_worker_info().id


def by_sync(depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_sync(other(), by_sync, (depth - 1,))


def by_async(depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_async(other(), by_async, (depth - 1,)).wait()


def by_then(depth: int) -> int:
    if depth == 0:
        return 0
    return rpc.rpc_async(other(), by_then, (depth - 1,)).then(lambda f: f.wait() + 1).wait()


def by_remote(depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.remote(other(), by_remote, (depth - 1,)).to_here()


def by_wait_all(depth: int) -> int:
    if depth == 0:
        return 0
    futures = [
        rpc.rpc_async(other(), by_wait_all, (depth - 1,)),
        rpc.rpc_async(other(), echo, (1,)),
    ]
    return sum(torch.futures.wait_all(futures))


def by_event(depth: int) -> int:
    """Waits for something of threading's, which zrpc does not notice."""
    if depth == 0:
        return 0
    came = threading.Event()
    future = rpc.rpc_async(other(), by_event, (depth - 1,))
    future.add_done_callback(lambda f: came.set())
    assert came.wait(SOON)
    return 1 + future.wait()


def by_self(depth: int) -> int:
    here = rpc.get_worker_info()
    return 0 if depth == 0 else 1 + rpc.rpc_sync(here, by_self, (depth - 1,))


@async_execution
def by_async_execution(depth: int) -> Any:
    if depth == 0:
        return rpc.rpc_async(other(), echo, (0,))
    later = rpc.rpc_async(other(), by_async_execution, (depth - 1,))
    return later.then(lambda f: f.wait() + 1)


@pytest.mark.system
@pytest.mark.zrpc(options={"num_worker_threads": 2}, timeout=60)
@pytest.mark.parametrize(
    "recurse", [by_sync, by_async, by_then, by_remote, by_self, by_async_execution]
)
def test_recursion_of_depth_200(caller: Mesh, recurse: Any) -> None:
    assert rpc.rpc_sync(1, recurse, (200,), timeout=50) == 200


@pytest.mark.zrpc(options={"num_worker_threads": 2}, timeout=60, processes=True)
def test_recursion_of_depth_200_between_processes(mesh: Mesh) -> None:
    assert mesh.run(0, rpc.rpc_sync, 1, by_sync, (200,), None, 50) == 200


@pytest.mark.system
@pytest.mark.zrpc(options={"num_worker_threads": 2}, timeout=60)
@pytest.mark.parametrize("recurse", [by_wait_all, by_event])
def test_recursion_with_waits_that_are_not_seen(caller: Mesh, recurse: Any) -> None:
    # Far deeper than the four running threads reach.
    assert rpc.rpc_sync(1, recurse, (7,), timeout=50) == 7


_lock = threading.Lock()


def add_under_lock(n: int) -> int:
    with _lock:
        return rpc.rpc_sync(0, echo, (n,))


@pytest.mark.zrpc(options={"num_worker_threads": 2})
def test_handlers_that_call_while_they_hold_a_lock(caller: Mesh) -> None:
    futures = [rpc.rpc_async(1, add_under_lock, (n,)) for n in range(30)]
    assert torch.futures.wait_all(futures) == list(range(30))


@pytest.mark.zrpc(options={"num_worker_threads": 2})
def test_after_a_deep_recursion_the_threads_go(caller: Mesh) -> None:
    before = {t.name for t in threading.enumerate()}
    rpc.rpc_sync(1, by_sync, (100,))
    # They end once they are idle, but for as many as the pool keeps.
    for _ in range(50):
        rpc.rpc_sync(1, echo, (1,))
    new = [t for t in threading.enumerate() if t.name not in before]
    for thread in new:
        if thread.name.startswith("zrpc-") and "worker-" in thread.name:
            thread.join(0.02)
    alive = [t.name for t in new if t.is_alive() and "zrpc-worker" in t.name]
    assert len(alive) <= 10, alive
