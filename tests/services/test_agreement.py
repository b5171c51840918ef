"""Two workers that lose each other while others reach both: all agree who is out."""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh, faults

pytestmark = [
    pytest.mark.system,
    pytest.mark.zrpc(workers=3, timeout=60, faults=True, options={"heartbeat_timeout": 1.0}),
]


def members() -> set[int]:
    """Returns the ranks that a worker counts, itself included."""
    return {info.id for info in zrpc.get_worker_infos()}


def meet(mesh: Mesh) -> None:
    """Lets all talk with all."""
    for one, other in itertools.permutations(range(len(mesh)), 2):
        assert mesh.run(one, zrpc.rpc_sync, other, echo, (1,)) == 1


def gather() -> dict[str, None]:
    """Gathers once all have heard who is out."""
    deadline = time.monotonic() + SOON
    while True:
        try:
            return zrpc.all_gather(None)
        except zrpc.WorkerDied:
            assert time.monotonic() < deadline


def cut(mesh: Mesh, *pairs: tuple[int, int]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for pair in pairs:
        stack.enter_context(faults.cut(mesh, *pair))
    return stack


def until_counted(mesh: Mesh, counted: dict[int, set[int]]) -> None:
    """Waits until workers count these members."""
    until(
        lambda: {rank: mesh.run(rank, members) for rank in counted} == counted,
        lambda: str({rank: mesh.run(rank, members) for rank in counted}),
    )


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 2)], ids=str)
def test_a_third_worker_puts_out_one_of_two(mesh: Mesh, pair: tuple[int, int]) -> None:
    meet(mesh)
    stays, out = pair
    third = ({0, 1, 2} - set(pair)).pop()
    with cut(mesh, pair):
        until_counted(mesh, {stays: {stays, third}, third: {stays, third}, out: {out}})
    why = f"worker{third} has decided that, since it and worker{stays} had lost each other"
    with pytest.raises(zrpc.WorkerDied, match=f"it was put out of the mesh: {why}"):
        mesh.run(third, zrpc.rpc_sync, out, echo, (1,))
    with pytest.raises(zrpc.WorkerDied, match=f"this worker was put out of the mesh: {why}"):
        mesh.run(out, zrpc.rpc_sync, third, echo, (1,))
    # The others go on, and each shutdown ends.
    gathered = [mesh.submit(rank, gather) for rank in (stays, third)]
    assert [set(each.result(SOON)) for each in gathered] == [
        {f"worker{stays}", f"worker{third}"}
    ] * 2
    with pytest.raises(zrpc.WorkerDied, match="is gone"):
        mesh.run(out, zrpc.all_gather, out)
    for end in [mesh.submit(rank, zrpc.shutdown) for rank in range(3)]:
        end.result(SOON)


def test_calls_in_flight_of_a_worker_that_is_put_out_fail(mesh: Mesh) -> None:
    meet(mesh)
    with Gate() as gate:
        waiting = mesh.submit(2, zrpc.rpc_sync, 0, gate.wait_inside, timeout=0)
        gate.await_entry()
        with cut(mesh, (1, 2)), pytest.raises(zrpc.WorkerDied, match="this worker was put out"):
            waiting.result(SOON)


@pytest.mark.zrpc(workers=4)
def test_the_worker_that_has_lost_more_goes(mesh: Mesh) -> None:
    meet(mesh)
    with cut(mesh, (0, 1), (0, 2)):
        rest = {1, 2, 3}
        until_counted(mesh, {0: {0}, **dict.fromkeys(rest, rest)})
    assert mesh.run(1, zrpc.rpc_sync, 3, echo, (1,)) == 1


@pytest.mark.zrpc(workers=4)
def test_a_leader_of_the_shutdown_that_is_put_out_lets_nobody_go(mesh: Mesh) -> None:
    meet(mesh)
    with cut(mesh, (0, 1), (0, 2)):
        ends = [mesh.submit(rank, zrpc.shutdown) for rank in (0, 3)]
        ends[0].result(SOON)
    for rank in (1, 2):
        assert mesh.run(rank, zrpc.rpc_sync, 3, echo, (1,)) == 1
    ends += [mesh.submit(rank, zrpc.shutdown) for rank in (1, 2)]
    for end in ends:
        end.result(SOON)


@pytest.mark.zrpc(workers=4)
def test_a_mesh_that_is_split_stays_split(mesh: Mesh) -> None:
    """Each side goes on, also when the network is whole again."""
    meet(mesh)
    sides = {0, 1}, {2, 3}
    with cut(mesh, *itertools.product(*sides)):
        until_counted(mesh, {rank: side for side in sides for rank in side})
    for rank in (0, 2):
        assert mesh.run(rank, zrpc.rpc_sync, rank + 1, echo, (1,)) == 1
        with pytest.raises(zrpc.WorkerDied, match=r"no longer answers|declared this worker"):
            mesh.run(rank, zrpc.rpc_sync, (rank + 2) % 4, echo, (1,))
    for end in [mesh.submit(rank, zrpc.shutdown) for rank in range(4)]:
        end.result(SOON)
