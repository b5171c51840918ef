"""What a mesh leaves in its store, as workers come and go, die, and are stopped for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import zrpc as rpc
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.bootstrap import join_mesh
from zrpc.membership.secret import find_secret
from zrpc.options import ZmqRpcBackendOptions
from zrpc.services.elastic.follower import ElasticMembership
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.testing import Mesh
from zrpc.testing.leaks import lasting

TIMEOUT_SECONDS = 30.0
EVENTS = 6  # between two snapshots
LIMITS = ElasticLimits(snapshot_events=EVENTS, snapshot_events_per_member=0)
STEADY = 3
# The events of three snapshots, if six workers join or leave at once; notes; single entries.
MAX_ENTRIES = 3 * (EVENTS + 6 + STEADY) + 6 + STEADY + 5


@pytest.fixture
def store() -> dist.TCPStore:
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    with lasting():  # it outlives the workers, and torch's servers share something
        return dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)


def compact_often() -> None:
    current_agent().service(ElasticMembership).follower._state.limits = LIMITS


def have_guests(port: int, names: list[str], at_once: int) -> None:
    """Workers that join, are called, and leave, in one process."""

    def visit(name: str) -> None:
        limit = timedelta(seconds=TIMEOUT_SECONDS)
        client = dist.TCPStore("127.0.0.1", port, None, False, limit)
        options = ZmqRpcBackendOptions(init_timeout=TIMEOUT_SECONDS, heartbeat_timeout=1.0)
        guest = join_mesh(
            name,
            rank=None,
            world_size=None,
            store=client,
            options=options,
            secret=find_secret(),
            elastic_limits=LIMITS,
        )
        try:
            with host.as_current():
                assert rpc.rpc_sync(name, max, (1, 2)) == 2
        finally:
            guest.shutdown(graceful=False)

    host = current_agent()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(visit, names))


def known() -> tuple[int, list[str]]:
    state = current_agent().service(ElasticMembership).follower._state
    return state.position, sorted(record.name for record in state.members.values())


@pytest.mark.zrpc(elastic=True, processes=True, timeout=80)
def test_the_store_does_not_grow_as_workers_come_and_go(
    store: dist.TCPStore, make_mesh: Callable[..., Mesh]
) -> None:
    options = {"init_method": f"tcp://127.0.0.1:{store.port}", "heartbeat_timeout": 1.0}
    mesh = make_mesh(workers=STEADY, options=options)
    mesh.run_all(compact_often)

    def receive_guests(workers: Iterable[int], prefix: str, count: int, at_once: int = 1) -> None:
        futures = []
        for worker in workers:
            names = [f"{prefix}{worker}-{i}" for i in range(count)]
            futures.append(mesh.submit(worker, have_guests, store.port, names, at_once))
        for future in futures:
            future.result(TIMEOUT_SECONDS)

    def agree(workers: Iterable[int]) -> tuple[int, list[str]] | None:
        found = [mesh.run(worker, known) for worker in workers]
        return found[0] if found == found[:1] * len(found) else None

    receive_guests(range(STEADY), "guest", 4)
    mesh.pause(1)
    receive_guests([0, 2], "quick", 3, at_once=3)
    mesh.kill(2)
    receive_guests([0], "last", 1)
    mesh.resume(1)
    until(lambda: agree([0, 1]), "the worker that was stopped knows what the other does")
    position, members = agree([0, 1])
    assert members == ["worker0", "worker1"]
    assert position >= 3 * (12 + 6 + 1)
    # And not one for each event, and each worker there ever was.
    assert store.num_keys() <= MAX_ENTRIES
    receive_guests([1], "guest-of-both", 1)
