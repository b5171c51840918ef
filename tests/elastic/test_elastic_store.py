"""What a mesh leaves in its store, as workers come and go, die, and are stopped for a while."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import zrpc as rpc
import zrpc.horizon
from zrpc.api import start_agent
from zrpc.current import current_agent
from zrpc.elastic import ElasticLayer
from zrpc.options import ZmqRpcBackendOptions
from zrpc.secret import find_secret
from zrpc.testing.leaks import lasting

PATIENCE = 30.0
LENGTH = 6  # of the news between two summaries, but for what each member adds
STEADY = 3
# The news of three lengths, where six have joined or left at once; notes, and what there is once.
MOST = 3 * (LENGTH + 6 + STEADY) + 6 + STEADY + 5


@pytest.fixture
def store():
    limit = timedelta(seconds=PATIENCE)
    with lasting():  # it outlives the workers, and torch's servers share something
        return dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)


def shorten_often():
    zrpc.horizon._LENGTH, zrpc.horizon._LENGTH_PER_MEMBER = LENGTH, 0


def have_guests(port, names, at_once):
    """Workers that join, are called, and leave, in one process."""

    def visit(name):
        limit = timedelta(seconds=PATIENCE)
        client = dist.TCPStore("127.0.0.1", port, None, False, limit)
        options = ZmqRpcBackendOptions(init_timeout=PATIENCE, heartbeat_timeout=1.0)
        guest = start_agent(
            name, rank=None, world_size=None, store=client, options=options, secret=find_secret()
        )
        try:
            with host.as_current():
                assert rpc.rpc_sync(name, max, (1, 2)) == 2
        finally:
            guest.shutdown(graceful=False)

    host = current_agent()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(visit, names))


def known():
    roster = current_agent().layer(ElasticLayer)._roster
    return roster.position, sorted(card.name for card in roster.members.values())


@pytest.mark.zrpc(elastic=True, processes=True, timeout=80)
def test_the_store_does_not_grow_as_workers_come_and_go(store, make_mesh, until):
    options = {"init_method": f"tcp://127.0.0.1:{store.port}", "heartbeat_timeout": 1.0}
    mesh = make_mesh(workers=STEADY, options=options)
    mesh.run_all(shorten_often)

    def receive_guests(workers, prefix, count, at_once=1):
        futures = []
        for worker in workers:
            names = [f"{prefix}{worker}-{i}" for i in range(count)]
            futures.append(mesh.submit(worker, have_guests, store.port, names, at_once))
        for future in futures:
            future.result(PATIENCE)

    def agree(workers):
        found = [mesh.run(worker, known) for worker in workers]
        return found[0] if found == found[:1] * len(found) else None

    receive_guests(range(STEADY), "guest", 4)
    mesh.pause(1)
    receive_guests([0, 2], "quick", 3, at_once=3)
    mesh.kill(2)
    receive_guests([0], "last", 1)
    mesh.resume(1)
    until(lambda: agree([0, 1]), "the one that was stopped knows what the other does")
    position, members = agree([0, 1])
    assert members == ["worker0", "worker1"]
    assert position >= 3 * (12 + 6 + 1)
    assert store.num_keys() <= MOST  # and not one for each item, and each worker that ever was
    receive_guests([1], "guest-of-both", 1)
