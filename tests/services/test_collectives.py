"""The gatherings and barriers of `zrpc.api`, which programs for torch use there."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.membership.failure_detector import Reason
from zrpc.services.collectives import Collectives
from zrpc.testing import Mesh, faults

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

NAMES = ["worker0", "worker1", "worker2"]


def gather(*args: Any, **kwargs: Any) -> Any:
    return rpc.api._all_gather(*args, **kwargs)


def left(mesh: Mesh) -> list[int]:
    """How many gatherings each worker collects."""
    return [sum(len(team.collected) for team in teams(mesh, name).values()) for name in mesh]


def teams(mesh: Mesh, worker: Any) -> Any:
    return mesh.agent(worker).service(Collectives)._teams


def test_every_worker_gets_what_every_worker_gives(mesh: Mesh) -> None:
    def run() -> list[object]:
        own = rpc.get_worker_info().id
        return [gather(own), gather({"tensor": torch.full((2,), float(own))})]

    for numbers, tensors in mesh.run_all(run):
        assert numbers == {"worker0": 0, "worker1": 1, "worker2": 2}
        assert list(tensors) == NAMES
        assert [tensors[name]["tensor"].tolist() for name in NAMES] == [[0, 0], [1, 1], [2, 2]]
    assert left(mesh) == [0, 0, 0]


def test_some_of_the_workers(mesh: Mesh) -> None:
    """Their gatherings are counted apart from those of all; the others have none of it."""
    futures = [mesh.submit(rank, gather, rank, {"worker2", "worker1"}) for rank in (1, 2)]
    assert [f.result(SOON) for f in futures] == [{"worker1": 1, "worker2": 2}] * 2
    assert mesh.run(2, gather, "own", ["worker2"]) == {"worker2": "own"}
    assert mesh.run_all(gather, None) == [dict.fromkeys(NAMES)] * 3


class SlowToPack:
    """A value that is packed when the test lets it."""

    def __init__(self, begun: threading.Event, may_go_on: threading.Event) -> None:
        self.begun = begun
        self.may_go_on = may_go_on

    def __reduce__(self) -> Any:
        self.begun.set()
        assert self.may_go_on.wait(SOON)
        return int, (0,)


def test_several_threads_of_a_worker_gather_at_once(mesh: Mesh) -> None:
    """A later gathering doesn't mean that the worker has abandoned an earlier one."""
    begun, may_go_on = threading.Event(), threading.Event()

    def both() -> list[Any]:
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(context.run, gather, SlowToPack(begun, may_go_on))
            assert begun.wait(SOON)
            return [gather(1), first.result(SOON)]

    ours = mesh.submit(1, both)
    others = [mesh.submit(rank, lambda: [gather(2), gather(3)]) for rank in (0, 2)]
    until(lambda: left(mesh)[0] == 2, "the second value has come, and the others' first")
    may_go_on.set()
    second = {"worker0": 3, "worker1": 1, "worker2": 3}
    first = {"worker0": 2, "worker1": 0, "worker2": 2}
    assert ours.result(SOON) == [second, first]
    assert [other.result(SOON) for other in others] == [[first, second]] * 2
    assert left(mesh) == [0, 0, 0]


def test_one_that_takes_no_part(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"worker0.*to be one of \['worker1'\]"):
        mesh.run(0, gather, 1, ["worker1"])
    with pytest.raises(rpc.RpcError, match="could not find destination 'nobody'"):
        mesh.run(0, gather, 1, ["worker0", "nobody"])
    for wrong in ("worker0", 0, rpc.WorkerInfo("worker0", 0)):
        with pytest.raises(TypeError, match=r"expected the workers that take part.* write \["):
            mesh.run(0, rpc.barrier, wrong)
    with pytest.raises(ValueError, match="expected a name, a rank or a WorkerInfo"):
        mesh.run(0, rpc.barrier, [None])


def test_workers_may_be_given_by_name_rank_and_info(mesh: Mesh) -> None:
    ways = ["worker0", 1], [0, rpc.WorkerInfo("worker1", 1)]
    gathered = [mesh.submit(rank, rpc.all_gather, rank, way) for rank, way in enumerate(ways)]
    assert [each.result(SOON) for each in gathered] == [{"worker0": 0, "worker1": 1}] * 2
    everybody = [
        mesh.submit(rank, lambda: rpc.barrier(rpc.get_worker_infos())) for rank in range(3)
    ]
    assert [each.result(SOON) for each in everybody] == [None] * 3


@pytest.mark.system
def test_nobody_passes_a_barrier_before_the_last_has_come(mesh: Mesh) -> None:
    passed = threading.Semaphore(0)

    def run(wait: object, *args: object) -> None:
        wait(*args)  # type: ignore[operator]
        passed.release()

    for wait, args in ((rpc.api._wait_all_workers, ()), (rpc.api._barrier, (NAMES,))):
        early = [mesh.submit(rank, run, wait, *args) for rank in (0, 1)]
        assert not passed.acquire(timeout=0.2)
        mesh.run(2, run, wait, *args)
        for future in early:
            future.result(SOON)
        assert [passed.acquire(blocking=False) for _ in range(4)] == [True] * 3 + [False]


def test_one_that_comes_too_late(mesh: Mesh) -> None:
    def in_time() -> dict[str, object]:
        with pytest.raises(rpc.RpcTimeoutError, match="100 ms"):
            gather("early", timeout=0.1)
        return gather("again")

    others = [mesh.submit(rank, in_time) for rank in (0, 1)]

    def late() -> dict[str, object]:
        # They have come to the next one: only then is it known that they gave this one up.
        until(lambda: list(teams(mesh, 0)[frozenset(NAMES)].oldest.values()) == [1, 1], within=SOON)
        with pytest.raises(rpc.RpcError, match="worker0 has gone on to a later one"):
            gather("late")
        return gather("again")

    expected = dict.fromkeys(NAMES, "again")
    assert mesh.run(2, late) == expected
    assert [other.result(SOON) for other in others] == [expected] * 2
    assert left(mesh) == [0, 0, 0]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "one late"])
def test_one_whose_value_can_not_be_sent(mesh: Mesh, late: bool) -> None:
    """The others are told when it comes to the next one, also one that comes later."""
    told = threading.Event()

    def fail() -> dict[str, object]:
        with pytest.raises(rpc.SerializationError):
            gather(threading.Lock())
        return gather("again")

    def wait() -> dict[str, object]:
        with pytest.raises(rpc.RpcError, match="worker1 has gone on to a later one"):
            gather("value")
        told.set()
        return gather("again")

    def wait_late() -> dict[str, object]:
        assert told.wait(SOON)
        return wait()

    functions = (wait, fail, wait_late if late else wait)
    futures = [mesh.submit(rank, function) for rank, function in enumerate(functions)]
    assert [f.result(SOON) for f in futures] == [dict.fromkeys(NAMES, "again")] * 3
    assert left(mesh) == [0, 0, 0]


@pytest.mark.system
@pytest.mark.parametrize("gone", [0, 2], ids=["the collector", "another"])
def test_one_that_is_gone(mesh: Mesh, gone: int) -> None:
    """Those that wait are told, and those that come later; a barrier only logs it."""
    there = [rank for rank in range(3) if rank != gone]
    waiting = mesh.submit(there[0], gather, "value")
    until(lambda: left(mesh)[0])
    mesh.run(gone, rpc.shutdown, graceful=False)
    with pytest.raises(rpc.WorkerDied):
        waiting.result(SOON)
    with pytest.raises(rpc.WorkerDied):
        mesh.run(there[1], gather, "value", NAMES)
    mesh.run(there[1], rpc.api._barrier, NAMES)
    # Should another worker come under that name, all begin with it at the same number.
    until(lambda: not any(t.begun or t.oldest for r in there for t in teams(mesh, r).values()))


@pytest.mark.system
@pytest.mark.zrpc(faults=True, options={"heartbeat_timeout": 1.0})
@pytest.mark.parametrize("pair", [(1, 2), (0, 1)], ids=["two others", "the collector"])
def test_two_that_have_lost_each_other(mesh: Mesh, pair: tuple[int, int]) -> None:
    """All are told, whoever comes first, and whether it has lost one of the two itself."""
    third = ({0, 1, 2} - set(pair)).pop()
    for rank in range(3):
        mesh.run(rank, rpc.rpc_sync, (rank + 1) % 3, echo, (1,))
    with faults.cut(mesh, *pair):
        for one, other in (pair, reversed(pair)):
            until(lambda a=one, b=other: b in mesh.agent(a).membership.lost)  # type: ignore[misc]
    waiting = mesh.submit(third, gather, "value")
    ends = [mesh.submit(rank, rpc.api._wait_all_workers) for rank in pair]
    ends.append(waiting)
    ends.append(mesh.submit(third, rpc.api._wait_all_workers))
    for end in ends:
        with pytest.raises(rpc.WorkerDied, match="is gone"):
            end.result(SOON)
    assert left(mesh) == [0, 0, 0]


@pytest.mark.system
@pytest.mark.zrpc(faults=True, options={"heartbeat_timeout": 1.0})
def test_one_that_was_declared_dead_and_has_ended_is_not_counted(mesh: Mesh) -> None:
    mesh.run(0, rpc.rpc_sync, 2, echo, (1,))
    with faults.cut(mesh, 0, 2):
        until(lambda: 2 in mesh.agent(0).membership.lost)
    with pytest.raises(rpc.WorkerDied, match="worker2 is gone"):
        mesh.run(0, gather, "value")
    agents = [mesh.agent(rank) for rank in (0, 1)]
    for agent in agents:  # as the log of an elastic mesh reports it
        agent.receiver.in_io_thread(partial(agent.peers.remove, 2, Reason.ENDED))
    until(lambda: all(agent.liveness.reason(2) is Reason.ENDED for agent in agents))
    futures = [mesh.submit(rank, gather, rank) for rank in (0, 1)]
    assert [f.result(SOON) for f in futures] == [{"worker0": 0, "worker1": 1}] * 2


def test_all_workers_that_an_agent_knows(mesh: Mesh) -> None:
    """Programs find them by torch's private name."""

    def run() -> object:
        agent = rpc._get_current_rpc_agent()
        return agent.get_worker_infos(), agent.get_worker_info(), agent.get_worker_info("worker1")

    infos = [rpc.WorkerInfo(name, rank) for rank, name in enumerate(NAMES)]
    assert mesh.run(2, run) == (infos, infos[2], infos[1])
