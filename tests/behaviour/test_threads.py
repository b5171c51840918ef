"""Calls from many threads and workers, and handlers that call and wait at any depth."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.settled import result_within
from tests.support.targets import echo
from tests.support.threads import start_all
from tests.support.waiting import SOON
from tests.support.ways import by_async, by_remote
from zrpc.functions import async_execution
from zrpc.testing import Mesh


def other() -> int:
    return 1 - rpc.get_worker_info().id


# Each calls a function on the other worker, and waits for its value, which is a number.
HOPS: dict[str, Callable[..., int]] = {
    "sync": rpc.rpc_sync,
    "async": by_async,
    "then": lambda *call: rpc.rpc_async(*call).then(lambda f: f.wait()).wait(),
    "remote": by_remote,
    "self": lambda _, *call: rpc.rpc_sync(rpc.get_worker_info(), *call),
    "wait_all": lambda *call: sum(
        torch.futures.wait_all([rpc.rpc_async(*call), rpc.rpc_async(other(), echo, (0,))])
    ),
    # Waits for something of threading's, which zrpc does not notice.
    "event": lambda *call: result_within(rpc.rpc_async(*call), SOON),
}


def recurse(depth: int, hop: str) -> int:
    return 0 if depth == 0 else 1 + HOPS[hop](other(), recurse, (depth - 1, hop))


@async_execution
def by_async_execution(depth: int, _: str) -> Any:
    if depth == 0:
        return rpc.rpc_async(other(), echo, (0,))
    later = rpc.rpc_async(other(), by_async_execution, (depth - 1, _))
    return later.then(lambda f: f.wait() + 1)


@pytest.mark.system
@pytest.mark.zrpc(options={"num_worker_threads": 2}, timeout=60)
@pytest.mark.parametrize("hop", [*HOPS, "async_execution"])
def test_recursion(caller: Mesh, hop: str) -> None:
    """Where waits are not seen, it is still far deeper than the four running threads reach."""
    function = recurse if hop in HOPS else by_async_execution
    depth = 7 if hop in ("wait_all", "event") else 200
    assert rpc.rpc_sync(1, function, (depth, hop), timeout=50) == depth


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
    rpc.rpc_sync(1, recurse, (100, "sync"))
    # They end once they are idle, but for as many as the pool keeps.
    for _ in range(50):
        rpc.rpc_sync(1, echo, (1,))
    new = [t for t in threading.enumerate() if t.name not in before]
    for thread in new:
        if thread.name.startswith("zrpc-") and "worker-" in thread.name:
            thread.join(0.02)
    alive = [t.name for t in new if t.is_alive() and "zrpc-worker" in t.name]
    assert len(alive) <= 10, alive


def test_the_first_calls_of_a_mesh_from_many_threads(caller: Mesh) -> None:
    """They all open the one mailbox."""
    together = threading.Barrier(16)

    def call(number: int) -> int:
        with caller.agent(0).as_current():
            together.wait(SOON)
            return rpc.rpc_sync(1, echo, (number,))

    assert start_all([partial(call, i) for i in range(16)], SOON)() == list(range(16))


@pytest.mark.system
def test_a_burst_of_ten_thousand(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, operator.mul, (i, 2)) for i in range(10_000)]
    assert torch.futures.wait_all(futures) == [2 * i for i in range(10_000)]


# -- more workers than torch's RPC can start on one machine ----------------------------------------


def call_everybody(count: int) -> list[int]:
    futures = [rpc.rpc_async(f"worker{i}", operator.add, (i, 1)) for i in range(count)]
    return torch.futures.wait_all(futures)


# In CI fewer than 64, whose 8000 connections by TCP take a minute on two cores.
_ON_ONE_HOST = int(os.environ.get("ZRPC_MANY_WORKERS", "40"))
_OVER_TCP = int(os.environ.get("ZRPC_MANY_WORKERS", "24"))
# All connect at once. With few cores that takes longer than a worker may be silent, which is left
# at its default.
_PATIENT = {"init_timeout": 120, "rpc_timeout": 240, "transport": "tcp"}


def everybody_calls_everybody(mesh: Mesh) -> None:
    expected = [list(range(1, len(mesh) + 1))] * len(mesh)
    assert mesh.run_all(call_everybody, len(mesh)) == expected


@pytest.mark.zrpc(workers=_ON_ONE_HOST, processes=True, timeout=120, options={"init_timeout": 60})
def test_many_processes_in_which_everybody_calls_everybody(mesh: Mesh) -> None:
    everybody_calls_everybody(mesh)


@pytest.mark.zrpc(workers=_OVER_TCP, processes=True, timeout=300, options=_PATIENT)
def test_many_processes_over_tcp_with_keys(mesh: Mesh) -> None:
    everybody_calls_everybody(mesh)
