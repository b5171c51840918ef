"""Shared memory when processes are killed at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.sharing import (
    LARGE,
    MIB,
    drop,
    introduce,
    keep,
    kept,
    kept_are_equal,
    large,
    own_layer,
    processes,
    segments_mapped,
    segments_open,
    send_on,
    sends_by_segments,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.services.shm.borrowed import Loans
from zrpc.services.shm.segments import Segment
from zrpc.testing import Mesh

pytestmark = sends_by_segments


def send_and_lend(rank: Any, count: Any) -> Any:
    introduce(rank)
    for i in range(count):
        zrpc.rpc_sync(rank, keep, (i, large(i)))
    return own_layer().pool.lent


def until_lost(rank: Any) -> None:
    layer = own_layer()
    until(lambda: rank in layer.agent.membership.lost and layer.pool.lent == 0, collect=True)


def numbers_of_free_segments() -> Any:
    return sorted(own_layer().pool._segments)


def drop_all() -> Any:
    """Drops what is kept; returns what is mapped then."""
    kept().clear()
    until(lambda: not own_layer().loans._open, collect=True)
    return segments_mapped()


@processes
@pytest.mark.zrpc(workers=3)
def test_the_receiver_is_killed_while_it_holds_tensors(mesh: Mesh) -> None:
    assert mesh.run(0, send_and_lend, 1, 4) == 4
    lent = set(mesh.run(0, numbers_of_free_segments))
    mesh.kill(1)
    mesh.run(0, until_lost, 1)
    used = mesh.run(0, send_on, 2, 5)
    assert used
    # What it had is closed; of the segments before, only such as were free may be used again.
    assert len(used & lent) <= len(lent) - 4
    mesh.run(2, send_on, 0, 3)
    assert mesh.run(0, lambda: len(segments_open())) <= 6


@processes
@pytest.mark.zrpc(workers=3)
def test_the_sender_is_killed_while_receivers_hold_tensors(mesh: Mesh) -> None:
    mesh.run(0, send_and_lend, 1, 4)
    mesh.run(0, send_and_lend, 2, 4)
    its = set(mesh.run(0, segments_open))
    mesh.kill(0)
    for rank in (1, 2):
        mesh.run(rank, until_lost, 0)
    mesh.run(1, send_on, 2, 5)
    mesh.run(2, send_on, 1, 5)
    for rank in (1, 2):
        assert mesh.run(rank, kept_are_equal, 4)
        assert its & set(mesh.run(rank, segments_mapped))
        assert not its & set(mesh.run(rank, drop_all))


def write_while_it_dies(rank: Any, pid: Any) -> Any:
    """Has the borrower killed, and its loss noticed, in the middle of a write to a segment."""
    introduce(rank)
    layer = own_layer()
    write = Segment.write
    noticed = []

    def slow(self, offset: Any, buffer: Any) -> None:
        if not noticed:
            os.kill(pid, signal.SIGKILL)
            until(lambda: rank in layer.agent.membership.lost, collect=True)
            # Whether the loss is dealt with now or waits for the end of the write is open.
            with contextlib.suppress(AssertionError):
                until(lambda: layer.pool.lent == 0, within=1, collect=True)
            noticed.append(True)
        write(self, offset, buffer)

    Segment.write = slow  # type: ignore[method-assign]
    try:
        zrpc.rpc_sync(rank, echo, (large(1, 1 << 22),))
    except zrpc.WorkerDied:
        until(lambda: layer.pool.lent == 0, collect=True)
        return bool(noticed)
    finally:
        Segment.write = write  # type: ignore[method-assign]
    return False


@processes
@pytest.mark.zrpc(workers=3)
def test_the_receiver_is_killed_while_the_sender_writes(mesh: Mesh) -> None:
    pid = mesh.pid(1)
    # The mesh knows of it as soon as it is dead: it does not count as an accident.
    waiting = mesh.submit(0, write_while_it_dies, 1, pid)
    assert waiting.result()
    assert mesh.run(0, send_on, 2, 2)
    mesh.kill(1)


def ask_one_that_dies_before_its_answer_is_read(rank: Any, pid: Any) -> Any:
    """The type of the error where the segment of an answer went with its owner."""
    own = own_layer()
    zrpc.rpc_sync(rank, introduce, (own.agent.worker_info.id,))
    until(lambda: not own.loans._open, collect=True)
    own.loans.close()  # forgets what is mapped, so that the answer's segment is mapped anew
    map_it = Loans._map
    tried = []

    def too_late(descriptor: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{pid}/fd/{descriptor.fd}"), collect=True)
        tried.append(descriptor)
        return map_it(descriptor)

    Loans._map = staticmethod(too_late)
    try:
        zrpc.rpc_sync(rank, large, (1,))
    except Exception as error:
        return len(tried), type(error).__name__
    finally:
        Loans._map = staticmethod(map_it)
    return None


@processes
def test_a_worker_that_is_killed_before_its_answer_is_read_has_died(mesh: Mesh) -> None:
    asked = mesh.submit(0, ask_one_that_dies_before_its_answer_is_read, 1, mesh.pid(1))
    assert asked.result() == (1, "WorkerDied")
    mesh.kill(1)


def work_until_told(seed: Any, directory: Any) -> Any:
    """Sends large tensors to all and checks each answer; says how many, and what failed."""
    layer = own_layer()
    me = layer.agent.worker_info.id
    stop = os.path.join(directory, "stop")
    chance = random.Random(seed)
    done, dead, kept_results = 0, set(), []
    rounds = 0
    while not os.path.exists(stop) or rounds < 4:
        rounds += 1
        calls = []
        for rank in range(4):
            if rank == me:
                continue
            for _ in range(2):
                value, count = chance.randrange(10_000), LARGE + chance.randrange(LARGE)
                calls.append((rank, value, count))
        futures = [zrpc.rpc_async(r, torch.neg, (large(v, c),)) for r, v, c in calls]
        for (rank, value, count), future in zip(calls, futures, strict=True):
            try:
                result = future.wait()
            except zrpc.WorkerDied:
                dead.add(rank)
                continue
            if not torch.equal(result, -large(value, count)):
                raise AssertionError(f"a wrong answer of {rank} to {value}, {count}")
            done += 1
            if chance.random() < 0.2:
                kept_results.append((result, value, count))
        for result, value, count in kept_results:
            if not torch.equal(result, -large(value, count)):
                raise AssertionError(f"a kept result has changed: {value}, {count}")
        del kept_results[:-6]
        open(os.path.join(directory, f"worker{me}"), "w").close()
    return done, sorted(dead)


# Not strict: it depends on the moment. See the test above for the same without chance.
@processes
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.zrpc(workers=4, options={"shared_memory": 24 * MIB})
def test_random_workers_are_killed_under_load(mesh: Mesh, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    working = {r: mesh.submit(r, work_until_told, seed * 10 + r, str(tmp_path)) for r in range(4)}
    until(lambda: len(os.listdir(tmp_path)) == 4, within=40, collect=True)
    victims = chance.sample(range(4), 2)
    for victim in victims:
        time.sleep(chance.uniform(0, 0.3))  # at any moment
        mesh.kill(victim)
        survivors = set(range(4)) - set(victims)
        for rank in survivors:  # a round later
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / f"worker{rank}").unlink()

        def worked(survivors: Any = survivors) -> Any:
            failed = [e for r in survivors if working[r].done() and (e := working[r].exception())]
            if failed:
                raise failed[0]
            return survivors <= {int(name[6:]) for name in os.listdir(tmp_path)}

        until(worked, within=40, collect=True)
    (tmp_path / "stop").touch()
    for rank in set(range(4)) - set(victims):
        done, dead = working[rank].result()
        assert done > 8
        assert set(dead) <= set(victims)
    first, second = sorted(set(range(4)) - set(victims))
    mesh.run(first, send_on, second, 2)


@processes
def test_nothing_is_open_or_mapped_after_a_shutdown(mesh: Mesh) -> None:
    for rank in range(2):
        mesh.run(rank, send_on, 1 - rank, 3)
        assert mesh.run(rank, lambda: (bool(segments_open()), bool(segments_mapped())))

    def leave() -> Any:
        zrpc.shutdown()
        return segments_open(), segments_mapped()

    assert mesh.run_all(leave) == [([], [])] * 2


def leave_with_a_tensor(rank: Any) -> None:
    introduce(rank)
    keep("held", zrpc.rpc_sync(rank, large, (5,)))


def leave_and_drop() -> Any:
    zrpc.shutdown()
    equal = torch.equal(kept()["held"], large(5))
    mapped = len(segments_mapped())
    drop("held")
    with contextlib.suppress(AssertionError):
        until(lambda: not segments_mapped(), within=1, collect=True)
    return equal, mapped, segments_open(), segments_mapped()


@processes
@pytest.mark.zrpc(leaks=False)
def test_after_a_shutdown_a_tensor_keeps_its_segment_and_nothing_else(mesh: Mesh) -> None:
    for rank in range(2):
        mesh.run(rank, introduce, 1 - rank)
    for rank in range(2):
        mesh.run(rank, leave_with_a_tensor, 1 - rank)
    assert mesh.run_all(leave_and_drop) == [(True, 1, [], [])] * 2
