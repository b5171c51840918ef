"""A worker that is killed while it waits for items of a queue, after it took others."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.services.shm.sharing import keep, kept
from tests.support.waiting import until
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, processes=True, options={"rpc_timeout": 30})


def keep_queue() -> None:
    """Makes the queue on worker0, and keeps its RRef here and on worker1."""
    rref = zrpc.remote(0, zrpc.Queue)
    assert rref.rpc_sync().empty()
    keep("queue", rref)
    zrpc.rpc_sync(1, keep, ("queue", rref))


def start_gets(count: int) -> None:
    for _ in range(count):
        kept()["queue"].rpc_async().get()


def waiting() -> int:
    return zrpc.stats().requests_in_progress


def put_and_get(items: list[Any]) -> list[Any]:
    for item in items:
        kept()["queue"].rpc_sync().put(item)
    found = []
    while len(found) < len(items):
        found += kept()["queue"].rpc_sync().get_batch(32)
    assert kept()["queue"].rpc_sync().empty()
    return found


def test_a_killed_worker_that_waits_takes_nothing_and_gives_nothing_back(mesh: Mesh) -> None:
    mesh.run(2, keep_queue)
    assert mesh.run(1, put_and_get, ["taken", "too"]) == ["taken", "too"]
    mesh.run(1, start_gets, 3)
    until(lambda: mesh.run(0, waiting) == 3)
    mesh.kill(1)
    # Worker0 may not know of its end yet, and send it some of them.
    assert sorted(mesh.run(2, put_and_get, list(range(6)))) == list(range(6))
