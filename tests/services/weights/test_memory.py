"""What versions take: one copy on a host, as long as somebody has it."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

from tests.services.shm.sharing import segments_mapped
from tests.services.weights.publishing import (
    SOON,
    Learner,
    Rollout,
    pool_of,
    raised_by,
    until_mapped,
    weights,
)
from tests.support.forks import exit_code, fork
from tests.support.waiting import until
from zrpc.nn import subscribe
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=90)


def test_all_subscribers_of_a_host_read_one_copy_whose_memory_is_used_again(mesh: Mesh) -> None:
    learner = Learner(mesh)
    rollouts = [Rollout(mesh, worker) for worker in (0, 1, 1, 2, 2)]
    for version in range(1, 9):
        learner.push()
        assert [rollout.read() for rollout in rollouts] == [(version, version)] * 5
        assert len(segments_mapped()) <= min(version, 3)
    assert sum(len(pool_of(mesh, worker)) for worker in range(3)) <= 3


def test_a_push_does_not_wait_for_readers_and_each_keeps_one_version(mesh: Mesh) -> None:
    learner, rollouts = Learner(mesh), [Rollout(mesh, worker) for worker in (1, 1, 2, 2)]
    for i, rollout in enumerate(rollouts):
        learner.push()
        assert rollout.load() == i + 1  # and then it is slow
    for _ in range(20):
        learner.push()
    assert len(segments_mapped()) <= len(rollouts) + 2
    pool, newest = pool_of(mesh), rollouts[2:]
    assert [rollout.load() for rollout in newest] == [24, 24]
    until(lambda: pool.lent == 3, collect=True)  # the newest, and those of the other two
    mesh.agent(0).close()
    for rollout in rollouts:
        rollout.model = weights(-1)
    assert [rollout.load() for rollout in rollouts] == [1, 2, 24, 24]  # what each still has
    assert [rollout.value for rollout in rollouts] == [1, 2, 24, 24]


def test_readers_never_see_half_of_a_version(mesh: Mesh) -> None:
    learner, stop = Learner(mesh, versions=1), threading.Event()

    def load_all() -> int:
        subscriber, count, last = subscribe("p"), 0, 0
        while not stop.is_set() or not count:
            model = weights(-1)
            version = subscriber.load_into(model, timeout=SOON)
            assert bool((model["a"] == version).all())
            assert version >= last
            count, last = count + 1, version
        return count

    readers = [mesh.submit(worker, load_all) for worker in (1, 2)]
    for _ in range(60):
        learner.push()
    stop.set()
    assert all(reader.result(SOON) > 0 for reader in readers)
    until(lambda: len(pool_of(mesh)) <= 4, collect=True, within=5)


def test_without_room_a_push_raises_and_the_version_before_stays(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(workers=2, options={"shared_memory": 3 << 19})  # for two versions
    learner = Learner(mesh)
    first, second = Rollout(mesh, 1), Rollout(mesh, 1)
    learner.push()
    first.load()
    learner.push()
    second.load()
    for _ in range(3):
        with pytest.raises(MemoryError, match=r"expected room for 524,352 bytes of shared memory"):
            learner.push(9)
    assert first.read() == (2, 2)
    assert learner.push(3) == 3
    assert second.load() == 3


@pytest.mark.system
def test_if_the_system_has_no_memory_a_push_raises_and_takes_none(mesh: Mesh) -> None:
    learner = Learner(mesh, count=1 << 23)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 23), limits[1]))
    try:
        assert isinstance(raised_by(learner.published.push), MemoryError)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(pool_of(mesh)) == 0
    assert learner.push() == 1
    rollout = Rollout(mesh, 1, count=1 << 23)
    assert rollout.load() == 1


def test_a_subscriber_that_is_lost_costs_one_version(mesh: Mesh) -> None:
    learner, rollouts = Learner(mesh), [Rollout(mesh, worker) for worker in (1, 2)]
    for version in range(1, 4):
        learner.push()
        assert [rollout.read() for rollout in rollouts] == [(version, version)] * 2
    mesh.agent(2).close()
    for version in range(4, 10):
        learner.push()
        assert rollouts[0].read() == (version, version)
    assert len(pool_of(mesh)) <= 4


def test_what_is_closed_returns_its_memory(mesh: Mesh) -> None:
    learner, rollouts = Learner(mesh, versions=1), [Rollout(mesh, worker) for worker in (1, 2)]
    for rollout in rollouts:
        rollout.load()
    pool = pool_of(mesh)
    mesh.run(1, rollouts[0].subscriber.close)
    mesh.run(0, learner.published.close)
    until(lambda: pool.lent == 1, collect=True)
    del rollout, rollouts  # dropped, not closed
    until(lambda: pool.lent == 0, collect=True)
    pool_of(mesh).close_idle(float("inf"))
    until_mapped(0)


@pytest.mark.system
def test_a_reader_that_has_forked_keeps_what_it_read(mesh: Mesh) -> None:
    learner, rollout = Learner(mesh, versions=1), Rollout(mesh, 1)
    rollout.load()
    assert exit_code(fork(lambda: None)) == 0
    for version in range(2, 8):
        learner.push()
        assert rollout.read() == (version, version)
