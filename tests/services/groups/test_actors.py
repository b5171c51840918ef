"""Groups of actors: each member keeps the order of its calls."""

from __future__ import annotations

import traceback

import pytest

import zrpc
from zrpc.testing import Mesh


@zrpc.actor
class Log:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def add(self, number: int, ballast: bytes = b"") -> None:
        self.seen.append(number)

    def all_seen(self) -> list[int]:
        return self.seen


def calls_in_turn() -> list[list[int]]:
    logs = zrpc.remote(zrpc.group("worker*"), Log)
    futures = []
    for number in range(60):
        # By the group, by a slice, and by a member: one order for each actor.
        called = (logs, logs[1:], logs[2])[number % 3]
        futures.append(called.rpc_async().add(number))
    found: list[list[int]] = logs.rpc_sync().all_seen()
    zrpc.wait_all(futures)
    return found


@pytest.mark.zrpc(workers=3)
def test_calls_of_groups_slices_and_members_have_one_order(mesh: Mesh) -> None:
    numbers = range(60)
    assert mesh.run(0, calls_in_turn) == [
        [n for n in numbers if n % 3 == 0],
        [n for n in numbers if n % 3 < 2],
        list(numbers),
    ]


def large_and_small() -> list[list[int]]:
    logs = zrpc.remote(zrpc.group(["worker1", "worker2"]), Log)
    for log in logs:
        log.ready()
    ballast = b"x" * 3_000_000
    futures = [log.rpc_async().add(n, b"" if n % 2 else ballast) for n in range(10) for log in logs]
    zrpc.wait_all(futures)
    found: list[list[int]] = logs.rpc_sync().all_seen()
    return found


@pytest.mark.zrpc(workers=3)
def test_small_calls_of_members_do_not_overtake_large_ones(mesh: Mesh) -> None:
    assert mesh.run(0, large_and_small) == [list(range(10))] * 2


@zrpc.actor
class Leaver:
    def leave(self) -> None:
        zrpc.shutdown(graceful=False)


def lose_both() -> zrpc.GroupError:
    leavers = zrpc.remote(zrpc.group(["worker1", "worker2"]), Leaver)
    with pytest.raises(zrpc.GroupError) as info:
        leavers.rpc_sync().leave()
    return info.value


@pytest.mark.zrpc(workers=3)
def test_the_errors_of_dead_members_name_the_class_and_nothing_else(mesh: Mesh) -> None:
    error = mesh.run(0, lose_both)
    for place, each in error.errors.items():
        assert isinstance(each, zrpc.OwnerDied)
        assert f"the actor Leaver on worker{place + 1} is lost" in str(each)
    assert "During handling" not in "".join(traceback.format_exception(error))


def stop_one() -> dict[int, BaseException]:
    logs = zrpc.remote(zrpc.group("worker*"), Log)
    logs[1].stop()
    try:
        logs.rpc_sync().add(1)
    except zrpc.GroupError as error:
        return error.errors
    return {}


def test_a_member_that_is_stopped_fails_alone(mesh: Mesh) -> None:
    errors = mesh.run(0, stop_one)
    assert list(errors) == [1]
    assert "was stopped" in str(errors[1])
