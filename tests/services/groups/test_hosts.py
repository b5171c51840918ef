"""Groups on several hosts: what goes to several members of a host is sent there once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import zrpc
from tests.services.elastic.conftest import Elastic
from tests.services.groups.conftest import outcomes
from tests.services.shm.sharing import MIB, large, service_of
from tests.support.gates import Gate
from tests.support.hosts import mesh_on_hosts, needs_tcp, on_hosts
from tests.support.observed import calls_to, stats_of
from tests.support.parting import leaving_at_once
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.waiting import SOON, until
from zrpc import autograd
from zrpc.agent.stats import GroupStats
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

OPTIONS = {"rpc_timeout": 40}
pytestmark = [
    pytest.mark.system,
    pytest.mark.zrpc(workers=7, timeout=90, options=OPTIONS),
    needs_tcp,
]
ALMOST = 1.2  # what is sent beside a tensor of a MiB is less than a fifth


class Hosts(NamedTuple):
    """A mesh on two hosts: the caller, and the workers of either; `far` has four."""

    mesh: Mesh
    caller: int
    near: list[int]
    far: list[int]

    def group(self, *workers: int) -> Any:
        return zrpc.group([self.mesh.names[each] for each in workers])

    def sent(self) -> GroupStats:
        return stats_of(self.mesh, self.caller).groups

    def sent_to_far(self) -> int:
        """How many bytes the caller has sent to the other host."""
        peers = stats_of(self.mesh, self.caller).peers
        return sum(
            peers[self.mesh.names[e]].bytes_sent for e in self.far if self.mesh.names[e] in peers
        )

    def until_asked(self, worker: int, other: int) -> None:
        """Waits until one worker waits for an answer of another one."""

        def asks() -> bool:
            peer = stats_of(self.mesh, other).peers.get(self.mesh.names[worker])
            return peer is not None and peer.calls_in_flight > 0

        until(asks)

    def until_nothing_is_left(self) -> None:
        living = [worker for worker in range(len(self.mesh)) if not self.mesh.agent(worker).closed]

        def left() -> list[str]:
            return [
                f"worker{worker}: held {segment.held}, lent to {dict(segment.borrowers)}"
                for worker in living
                for segment in list(service_of(self.mesh, worker).pool.segments.values())
                if segment.in_use
            ]

        until(lambda: not left(), lambda: "\n".join(left()), collect=True)


@pytest.fixture
def hosts(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Two hosts; the test itself is the first worker of the smaller one.

    At the end of each test, nothing is left in shared memory.
    """
    mesh, (near, far) = mesh_on_hosts(make_mesh, monkeypatch, workers=7)
    with leaving_at_once(mesh), mesh.agent(near[0]).as_current():
        found = Hosts(mesh, near[0], near, far)
        yield found
        found.until_nothing_is_left()


def total(tensor: torch.Tensor, *_: Any) -> float:
    return tensor.sum().item()


def name(*_: Any) -> str:
    return zrpc.get_worker_info().name


def gated(gate: Gate, tensor: torch.Tensor, item: int) -> tuple[str, float]:
    return (name() if item else gate.wait_inside(name())), total(tensor)


class Sums:
    """What it was called with, in order."""

    def __init__(self, first: torch.Tensor) -> None:
        self.sums = [total(first)]

    def add(self, tensor: torch.Tensor, number: int = 0) -> list[float]:
        self.sums.append(total(tensor) + number)
        return self.sums


# -- once to each host -----------------------------------------------------------------------------


def test_a_tensor_goes_once_to_each_host(hosts: Hosts) -> None:
    group, tensor = hosts.group(*range(7)), large(1)
    assert zrpc.rpc_sync(group, total, (tensor,)) == [total(tensor)] * 7
    sent = hosts.sent()
    # To its own host by shared memory, to itself, and to the other host.
    assert MIB < sent.bytes_packed < ALMOST * MIB
    assert sent.bytes_sent == 3 * sent.bytes_packed
    assert MIB < hosts.sent_to_far() < ALMOST * MIB
    # One member there puts it into shared memory.
    shared = [stats_of(hosts.mesh, each).traffic["shared_memory"].bytes_sent for each in hosts.far]
    assert sorted(each > MIB for each in shared) == [False, False, False, True]
    assert sum(shared) < ALMOST * MIB
    hosts.until_nothing_is_left()
    assert [len(service_of(hosts.mesh, each).pool) for each in hosts.far].count(0) == 3


def test_values_for_some_and_what_shared_items_have_in_common_go_there_once(hosts: Hosts) -> None:
    one, other, far = large(1), large(2), hosts.group(*hosts.far)
    found = zrpc.rpc_sync(far, total, (zrpc.each([one, other, one, one]),))
    assert found == [total(one), total(other), total(one), total(one)]
    assert 2 * MIB < hosts.sent_to_far() < ALMOST * 2 * MIB
    assert zrpc.rpc_sync(far[:2], total, (one, zrpc.share(range(9)))) == [total(one)] * 9
    assert hosts.sent_to_far() < ALMOST * 3 * MIB


def test_objects_and_their_methods(hosts: Hosts) -> None:
    group, tensors = hosts.group(*hosts.far), [large(number) for number in range(4)]
    values = zrpc.remote(group, zrpc.actor(Sums), (tensors[0],))
    futures = [values.rpc_async().add(each, number=1) for each in tensors[1:]]
    sums = [total(tensors[0]), *[total(each) + 1 for each in tensors[1:]]]
    assert futures[-1].wait() == [sums] * 4
    assert [each.wait() for each in futures[:-1]] == [[sums[:2]] * 4, [sums[:3]] * 4]
    assert hosts.sent_to_far() < ALMOST * 4 * MIB
    both = zrpc.group([values[0], values[0], values[1]])
    assert both.rpc_sync().add(tensors[0])[2][-1] == total(tensors[0])


def test_no_member_sees_what_another_one_writes(hosts: Hosts) -> None:
    def write(tensor: torch.Tensor, value: int) -> torch.Tensor:
        tensor.fill_(value)
        return tensor

    workers, tensor = [*range(7), hosts.far[0]], large(1)
    found = zrpc.rpc_sync(hosts.group(*workers), write, (tensor, zrpc.each(range(8))))
    assert [each.unique().tolist() for each in found] == [[number] for number in range(8)]
    assert torch.equal(tensor, large(1))


def test_a_member_gets_what_a_tensor_was_when_it_was_sent_and_keeps_it(
    hosts: Hosts, gate: Gate
) -> None:
    """The segments are not written again while members have tensors in them."""
    group, tensor = hosts.group(*range(7)), large(1)
    kept = zrpc.remote(group, list, ([],))
    for worker in hosts.far:
        zrpc.rpc_async(worker, gate.work_inside)
    gate.await_entry(4)
    future = kept.rpc_async().append(tensor)
    tensor.zero_()
    gate.open()
    future.wait()
    for number in range(2, 5):
        zrpc.rpc_sync(group, total, (large(number),))
    assert all(torch.equal(each, large(1)) for each in kept.rpc_sync().pop())


def test_in_an_autograd_context(hosts: Hosts) -> None:
    weight, constant = torch.ones(3, requires_grad=True), large(1)
    with autograd.context() as context:
        far = hosts.group(*hosts.far)
        results = zrpc.rpc_sync(far, lambda w, c: w * c.sum(), (weight, constant))
        autograd.backward(context, [torch.stack(results).sum()])
        assert autograd.get_gradients(context)[weight].tolist() == [4 * total(constant)] * 3
    assert hosts.sent_to_far() < ALMOST * MIB


def test_a_worker_that_joins_gets_what_its_host_has(
    elastic: Elastic,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_hosts(monkeypatch, iter([0, 1, 1]))
    caller = elastic.join("caller")
    elastic.join("w1")
    with caller.as_current():
        tensor = large(1)
        future = zrpc.rpc_async(
            zrpc.group("w*", live=True), gated, (gate, tensor, zrpc.share(range(5)))
        )
        gate.await_entry()
        elastic.join("w2")
        assert [part.wait() for part in future.parts[1:]] == [("w2", total(tensor))] * 4
        gate.open()
        assert future.wait()[0] == ("w1", total(tensor))
        sent = zrpc.stats().groups
        assert sent.bytes_sent == sent.bytes_packed


# -- if that is not possible -----------------------------------------------------------------------


@pytest.mark.zrpc(options={**OPTIONS, "shared_memory": 0})
def test_without_shared_memory_it_goes_to_each_member(hosts: Hosts) -> None:
    tensor = large(1)
    assert zrpc.rpc_sync(hosts.group(*range(7)), total, (tensor,)) == [total(tensor)] * 7
    assert hosts.sent_to_far() > 4 * MIB
    assert not zrpc.stats().traffic["shared_memory"].bytes_sent


@pytest.mark.zrpc(options={**OPTIONS, "shared_memory": 3 * MIB})
def test_if_the_worker_that_hands_on_has_no_room_it_uses_sockets(hosts: Hosts) -> None:
    first, *others = hosts.far
    _held = service_of(hosts.mesh, first).hold(2 * MIB + 1)
    tensor = large(1)
    assert zrpc.rpc_sync(hosts.group(*hosts.far), total, (tensor,)) == [total(tensor)] * 4
    assert hosts.sent_to_far() < ALMOST * MIB
    peers = stats_of(hosts.mesh, first).peers
    assert all(peers[hosts.mesh.names[each]].bytes_sent > MIB for each in others)


def test_a_lost_member_does_not_hand_on(hosts: Hosts) -> None:
    first = hosts.far[0]
    group, tensor = hosts.group(*hosts.far), large(1)
    zrpc.rpc_sync(first, name)
    hosts.mesh.agent(first).close()
    until(lambda: calls_to(hosts.mesh, first, hosts.caller).state == "lost")
    found = outcomes(zrpc.rpc_sync, group, total, (tensor,))
    assert found == [zrpc.WorkerDied, *[total(tensor)] * 3]


@pytest.mark.zrpc(options={**OPTIONS, "num_worker_threads": 1})
@pytest.mark.parametrize("how", ["lost", "busy"])
def test_if_the_first_fails_the_others_get_it_directly(hosts: Hosts, gate: Gate, how: str) -> None:
    """Each runs the call once."""
    first, *others = hosts.far
    counts = zrpc.remote(hosts.group(*others), Sums, (torch.zeros(1),))
    kept = zrpc.remote(first, Sums, (torch.zeros(1),))
    zrpc.rpc_async(first, gate.work_inside)
    gate.await_entry()
    tensor = large(1)
    future = zrpc.group([kept, *counts]).rpc_async().add(tensor)
    for worker in others:
        hosts.until_asked(first, worker)
    assert not any(part.done() for part in future.parts)
    if how == "lost":
        hosts.mesh.agent(first).close()
    for part in future.parts[1:]:
        assert part.wait() == [0, total(tensor)]
    assert hosts.sent_to_far() > 3 * MIB
    gate.open()
    if how == "busy":
        assert future.parts[0].wait() == [0, total(tensor)]
    assert counts.rpc_sync().add(torch.zeros(1)) == [[0, total(tensor), 0]] * 3


def test_an_argument_that_only_the_first_member_does_not_get(hosts: Hosts) -> None:
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise LookupError("not me")

    values = zrpc.each([Unpicklable(), 1, 2, 3])
    found = outcomes(zrpc.rpc_sync, hosts.group(*hosts.far), total, (large(1), values))
    assert found == [zrpc.SerializationError, *[total(large(1))] * 3]
    assert hosts.sent_to_far() < ALMOST * MIB


@pytest.mark.zrpc(options={**OPTIONS, "num_worker_threads": 1})
@pytest.mark.parametrize("end", ["cancel", "time-out"])
def test_a_call_that_ends_as_members_wait_leaves_nothing(
    hosts: Hosts, gate: Gate, end: str
) -> None:
    first, *others = hosts.far
    zrpc.rpc_async(first, gate.work_inside)
    gate.await_entry()
    timeout = 40 if end == "cancel" else 0.3
    future = zrpc.rpc_async(hosts.group(*hosts.far), total, (large(1),), timeout=timeout)
    if end == "cancel":
        for worker in others:
            hosts.until_asked(first, worker)
        future.cancel()
    with pytest.raises((zrpc.GroupError, zrpc.RpcCancelledError)):
        future.wait()
    gate.open()
    del future
    hosts.until_nothing_is_left()
    assert zrpc.rpc_sync(hosts.group(*hosts.far), name) == [hosts.mesh.names[e] for e in hosts.far]


def test_if_the_caller_is_lost_nothing_is_left(hosts: Hosts, gate: Gate) -> None:
    far = hosts.group(*hosts.far)

    def keep(tensor: torch.Tensor) -> None:
        gate.wait_inside()

    future = zrpc.rpc_async(far, keep, (large(1),))
    gate.await_entry(4)
    hosts.mesh.agent(hosts.caller).close()
    with pytest.raises(Exception, match=r"shut down|GroupError|members"):
        future.wait()
    gate.open()


def test_a_call_that_is_interrupted_at_any_step_leaves_nothing(hosts: Hosts) -> None:
    """Also the next call works."""
    group, tensor = hosts.group(*range(7)), large(1)

    def call() -> None:
        assert zrpc.rpc_sync(group, total, (tensor,)) == [total(tensor)] * 7

    def interrupt_there() -> None:
        # Python runs no handler where `Encoder.pack` only sets an attribute.
        if sys._getframe(2).f_code.co_name != "pack":
            interrupt()

    for step in some_steps(call):
        with contextlib.suppress(KeyboardInterrupt), at_step(step, interrupt_there):
            call()
        call()


def test_a_relay_keeps_nothing_if_the_word_that_it_is_not_needed_is_lost(
    hosts: Hosts, gate: Gate
) -> None:
    def kept() -> bool:
        pools = [service_of(hosts.mesh, each).pool for each in hosts.far]
        return any(segment.held for pool in pools for segment in pool.segments.values())

    calls = zrpc.rpc_async(
        hosts.group(*hosts.far), gated, (gate, large(1), zrpc.each([0, 1, 1, 1]))
    )
    gate.await_entry()
    until(kept)
    for each in hosts.far:
        agent = hosts.mesh.agent(each)
        lost = partial(agent.dispatcher.count_missing, MemberId(hosts.caller), 0, 0)
        agent.receiver.in_io_thread(lost)
    until(lambda: not kept())
    gate.open()
    assert [result for _, result in calls.wait()] == [total(large(1))] * 4


def test_a_malformed_ticket_fails_its_call_only(hosts: Hosts) -> None:
    agent = hosts.mesh.agent(hosts.caller)
    to = agent.membership.find(hosts.far[0])
    body: Any = (name, (), {})
    for data in (b"x", b"", bytes(23)):
        call = agent.caller.call_async(to, Kind.CALL, body, SOON, extension=(Tag.RELAYED, data))
        if data:
            with pytest.raises(zrpc.RpcError, match="extension"):
                call.wait()
        else:
            assert call.wait() == to.name
    unknown = bytes(8) + (99).to_bytes(8, "little") + bytes(8)
    call = agent.caller.call_async(to, Kind.CALL, body, SOON, extension=(Tag.RELAYED, unknown))
    with pytest.raises(zrpc.RpcCancelledError, match="no longer has the arguments"):
        call.wait()
    agent.outbox.post(to.member_id, Message(Kind.UNNEEDED, body=b"1234"))
    assert zrpc.rpc_sync(to, name) == to.name
