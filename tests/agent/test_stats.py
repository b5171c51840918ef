"""`zrpc.stats`: what a worker has done, in numbers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.support.gates import Gate
from tests.support.observed import ask_often, stats_of
from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from zrpc.agent import stats as rpc_stats
from zrpc.calls.call_counters import BUCKET_SECONDS, MAX_NAMES, OTHERS, CallCount, Table
from zrpc.services.rref.value import OwnedValue
from zrpc.testing import Mesh, faults
from zrpc.testing.plugin import MakeMesh
from zrpc.wire.member_id import MemberId

MIB = 1 << 20


def fail() -> None:
    raise KeyError("on purpose")


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as gate:
        yield gate


@pytest.mark.system
@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_the_times_of_a_call_add_up(mesh: Mesh, gate: Gate) -> None:
    def call() -> None:
        first = rpc.rpc_async("worker1", gate.wait_inside, (1,))
        gate.await_entry()
        second = rpc.rpc_async("worker1", max, (1, 2))
        until(lambda: mesh.agent(1).pool.load(0).queued == 1)
        during = stats_of(mesh), stats_of(mesh, 1)
        threading.Event().wait(0.2)
        gate.open()
        assert rpc.wait_all([first, second]) == [1, 2]
        return during

    caller, callee = mesh.run("worker0", call)
    assert caller.calls_in_flight == caller.peers["worker1"].calls_in_flight == 2
    assert callee.requests_in_progress == callee.peers["worker0"].requests_in_progress == 2
    assert (callee.threads.running, callee.threads.queued) == (1, 1)
    made = stats_of(mesh).calls["Gate.wait_inside"]
    run, queued = (stats_of(mesh, 1).handlers[name] for name in ("Gate.wait_inside", "max"))
    assert run.run_seconds >= 0.2
    assert made.seconds >= run.queue_seconds + run.run_seconds
    assert sum(made.histogram) == 1
    assert made.seconds / 2 <= made.quantile(1) <= 2 * made.seconds
    assert queued.queue_seconds >= 0.2
    assert queued.run_seconds < queued.queue_seconds


def test_each_call_is_counted_once_by_its_function_at_both_ends(mesh: Mesh) -> None:
    def call() -> None:
        for number in range(3):
            rpc.rpc_sync("worker1", torch.add, (torch.ones(2), number))
        assert rpc.rpc_async("worker1", twice_later, (4,)).wait() == 8
        assert rpc.rpc_sync("worker1", twice_by_future, (4,)) == 8
        rref = rpc.remote("worker1", max, (1, 2))
        assert rref.to_here() == 2
        assert rref.rpc_sync().bit_length() == 2
        for fails in (rpc.rpc_sync, lambda *call: rpc.remote(*call).to_here()):
            with pytest.raises(KeyError):
                fails("worker1", fail)

    mesh.run("worker0", call)
    # A value can come before the answer to the call that has made it.
    until(lambda: not stats_of(mesh, 0).calls_in_flight)
    caller, callee = stats_of(mesh, 0), stats_of(mesh, 1)
    calls = {name: (each.number, each.errors) for name, each in caller.calls.items()}
    handlers = {name: (each.number, each.errors) for name, each in callee.handlers.items()}
    once = dict.fromkeys(("twice_later", "twice_by_future", "max"), (1, 0))
    both = {"torch.add": (3, 0), "FETCH": (2, 1), **once}
    # A reference was made all the same: its value is an error.
    assert calls == {**both, "fail": (2, 1), "bit_length": (1, 0)}
    assert handlers == {**both, "fail": (2, 2), "int.bit_length": (1, 0)}
    assert not callee.calls
    assert not caller.handlers
    assert (caller.name, caller.rank, callee.name, callee.rank) == ("worker0", 0, "worker1", 1)


def test_a_handler_is_counted_before_its_value_is_there(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    sets = OwnedValue.set

    def noted(self: OwnedValue, *args: Any, **kwargs: Any) -> None:
        found.append("max" in stats_of(mesh, 1).handlers)
        sets(self, *args, **kwargs)

    monkeypatch.setattr(OwnedValue, "set", noted)
    assert mesh.run(0, lambda: rpc.remote("worker1", max, (1, 2)).to_here()) == 2
    assert found == [True]


async def twice_later(number: int) -> int:
    return 2 * number


@rpc.functions.async_execution
def twice_by_future(number: int) -> rpc.Future[int]:
    future: rpc.Future[int] = rpc.Future()
    future.set_result(2 * number)
    return future


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"transport": "tcp"}, "tcp"),
        ({"transport": "ipc"}, "direct"),
        ({"transport": "ipc", "shared_memory": 0}, "ipc"),
        ({"transport": "ipc"}, "shared_memory"),
    ],
    ids=["tcp", "direct", "ipc", "shared memory"],
)
def test_bytes_are_counted_by_way(make_mesh: MakeMesh, options: Any, way: str) -> None:
    mesh = make_mesh(workers=2, options=options)
    size = 100_000 if way in ("tcp", "direct") else 4 * MIB
    tensor = torch.zeros(size, dtype=torch.uint8)

    def send() -> None:
        # The first message to a worker asks whether it can open shared memory.
        rpc.rpc_sync("worker1", torch.numel, (tensor,))
        until(lambda: stats_of(mesh, 0).traffic[way].bytes_sent or send_once())
        rpc.rpc_sync("worker1", torch.numel, (tensor,))

    def send_once() -> None:
        rpc.rpc_sync("worker1", torch.numel, (tensor,))

    mesh.run("worker0", send)
    out, into = stats_of(mesh, 0), stats_of(mesh, 1)
    numbers = {each: sides(out.traffic[each], into.traffic[each]) for each in out.traffic}
    large = {each for each, sent in numbers.items() if min(sent) >= size}
    # Before shared memory is agreed upon, sockets carry large tensors.
    assert large - ({"ipc"} if way == "shared_memory" else set()) == {way}
    sent, received = numbers[way]
    assert sent == pytest.approx(received, rel=0.01)
    if way != "shared_memory":
        assert out.peers["worker1"].bytes_sent >= sent
        assert into.peers["worker0"].bytes_received >= received


def sides(out: rpc_stats.TrafficStats, into: rpc_stats.TrafficStats) -> tuple[int, int]:
    return out.bytes_sent, into.bytes_received


def test_calls_to_the_worker_itself_have_a_way_of_their_own(mesh: Mesh) -> None:
    mesh.run("worker0", rpc.rpc_sync, "worker0", max, args=(1, 2))
    traffic = stats_of(mesh, 0).traffic
    assert traffic["inproc"].bytes_sent == traffic["inproc"].bytes_received > 0
    assert {way for way, each in traffic.items() if each.bytes_sent} == {"inproc"}


@pytest.mark.zrpc(workers=2, options={"max_bytes_in_flight": 10_000})
def test_the_room_of_flow_control_is_shown(mesh: Mesh, gate: Gate) -> None:
    def call() -> None:
        first = rpc.rpc_async("worker1", gate.wait_inside)
        second = rpc.rpc_async("worker1", len, (bytes(9_000),))  # waits for room
        rpc.wait_all([first, second])

    calling = mesh.submit("worker0", call)
    until(lambda: peer_of(mesh).calls_without_room == 1)
    assert 0 < peer_of(mesh).room < 9_000
    assert peer_of(mesh).bytes_in_flight + peer_of(mesh).room == 10_000
    gate.open()
    calling.result(60)
    peer = peer_of(mesh)
    assert (peer.bytes_in_flight, peer.calls_without_room, peer.room) == (0, 0, 10_000)


def peer_of(mesh: Mesh) -> Any:
    peers = stats_of(mesh, 0).peers
    return peers.get("worker1", rpc_stats.PeerStats(1, "member", 0, 0, 0, 0, 0, 0, None))


def test_references_and_contexts_are_counted(mesh: Mesh) -> None:
    def hold_them() -> None:
        rref = rpc.remote("worker1", torch.ones, (2,))
        rref.to_here()
        with dist_autograd.context():
            tensor = torch.ones(2, requires_grad=True)
            rpc.rpc_sync("worker1", torch.add, (tensor, 1))
            return rref, rpc.stats(), rpc.rpc_sync("worker1", rpc.stats)

    rref, user, owner = mesh.run("worker0", hold_them)
    assert (user.rrefs_owned, user.rrefs_held, user.autograd_contexts) == (0, 1, 1)
    assert (owner.rrefs_owned, owner.rrefs_held, owner.autograd_contexts) == (1, 0, 1)
    del rref
    until(lambda: stats_of(mesh, 1).rrefs_owned == 0, collect=True)
    until(lambda: stats_of(mesh, 1).autograd_contexts == 0)


def test_a_lost_worker_is_still_in_the_numbers(mesh: Mesh) -> None:
    mesh.run("worker0", rpc.rpc_sync, "worker1", max, args=(1, 2))
    before = stats_of(mesh).traffic["direct"]
    mesh.agent(1).shutdown(graceful=False)
    until(lambda: stats_of(mesh).peers["worker1"].state == "lost")
    after = stats_of(mesh).traffic["direct"]
    assert after.bytes_sent >= before.bytes_sent > 0
    assert after.bytes_received >= before.bytes_received > 0


@pytest.mark.system
def test_no_count_is_lost_if_several_threads_count() -> None:
    table = Table(CallCount)
    numbers, threads = 20_000, 8

    def count() -> None:
        for _ in range(numbers):
            table["f"].add(0.001, True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        start_all([count] * threads, SOON)()
    finally:
        sys.setswitchinterval(interval)
    row = table["f"]
    assert sum(row.histogram()) == row.errors == numbers * threads
    assert row.seconds == pytest.approx(0.001 * numbers * threads)


@given(st.floats(0, 1e9))
def test_a_time_is_in_the_bucket_of_its_bounds(seconds: float) -> None:
    count = CallCount()
    count.add(seconds, False)
    (bucket,) = [i for i, number in enumerate(count.histogram()) if number]
    bounds = (0.0, *BUCKET_SECONDS, float("inf"))
    assert bounds[bucket] <= seconds + 2e-9
    assert seconds <= bounds[bucket + 1] + 2e-9


def test_names_without_end_are_counted_together() -> None:
    table = Table(CallCount)
    for number in range(MAX_NAMES + 10):
        table[f"f{number}"].add(0.0, False)
    assert len(table) == MAX_NAMES + 1
    assert sum(table[OTHERS].histogram()) == 10


@pytest.mark.system
@pytest.mark.zrpc(workers=2, faults=True, options={"heartbeat_timeout": 5})
def test_missed_heartbeats_and_reconnects_are_counted(mesh: Mesh) -> None:
    mesh.run("worker0", rpc.rpc_sync, "worker1", max, args=(1, 2))
    # The first connection is no reconnect.
    until(lambda: mesh.agent(0).liveness.silence(MemberId(1)) == 0.0, "the first heartbeat")
    assert stats_of(mesh, 0).heartbeats_missed == 0
    with faults.cut(mesh, 0, 1):
        until(lambda: stats_of(mesh, 0).heartbeats_missed, "a missed heartbeat")
        assert stats_of(mesh, 0).reconnects == 0
    until(lambda: stats_of(mesh, 0).reconnects, "a heartbeat after that")


@pytest.mark.system
@pytest.mark.zrpc(workers=2, faults=True)
def test_lost_messages_are_counted(mesh: Mesh) -> None:
    ask_often(mesh)
    mesh.run("worker0", rpc.rpc_sync, "worker1", max, args=(1, 2))
    assert lost_messages(mesh) == [0, 0]
    with faults.drop(mesh, 0, 1) as fault, pytest.raises(rpc.RpcError):
        mesh.run("worker0", rpc.rpc_sync, "worker1", max, args=(1, 2))
    assert fault.happened == 1
    # The callee misses a message, and the caller does not know what has become of its call.
    until(lambda: lost_messages(mesh) == [1, 1], lambda: f"{lost_messages(mesh)} lost messages")


def lost_messages(mesh: Mesh) -> list[int]:
    return [stats_of(mesh, worker).messages_lost for worker in (0, 1)]


def relay(gate: Gate) -> bool:
    return rpc.rpc_sync("worker0", gate.wait_inside, (True,))


def test_threads_that_wait_and_those_that_have_nothing_to_do(mesh: Mesh, gate: Gate) -> None:
    held = mesh.submit("worker0", rpc.rpc_sync, "worker1", relay, (gate,))
    gate.await_entry()
    until(lambda: stats_of(mesh, 1).threads.waiting == 1, "a handler that waits")
    assert stats_of(mesh, 1).threads.running == 0
    during = stats_of(mesh, 0).threads
    assert (during.running, during.waiting) == (1, 0)
    # One of these runs in the pool: the I/O thread takes no second handler.
    with mesh.agent(0).as_current():
        more = [rpc.rpc_async("worker1", gate.wait_inside, (True,)) for _ in range(2)]
    until(lambda: stats_of(mesh, 1).threads.running == 2, "two handlers that run")
    gate.open()
    assert held.result(60)
    assert rpc.wait_all(more) == [True, True]
    until(lambda: stats_of(mesh, 1).threads.idle, "a thread without work")
    after = stats_of(mesh, 1).threads
    assert (after.running, after.waiting, after.queued) == (0, 0, 0)
