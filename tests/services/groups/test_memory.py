"""What goes to all members: packed once for equal device maps, and once in shared memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.sharing import MIB, large, service_of, until_returned
from tests.support.agents import joined
from zrpc.agent.agent import Agent
from zrpc.testing import FakeDevice, Mesh, Operation, fake_device

pytestmark = pytest.mark.zrpc(workers=4, timeout=90, options={"rpc_timeout": 40})
LARGE_BYTES = MIB  # of `large`


class Picky:
    """Counts how often it is packed."""

    packed = 0

    def __reduce__(self) -> Any:
        Picky.packed += 1
        return Picky, ()


def total(tensor: torch.Tensor, more: Any = None) -> float:
    return tensor.sum().item()


def shared_bytes() -> int:
    return zrpc.stats().traffic["shared_memory"].bytes_sent


def test_what_several_members_get_is_packed_once(caller: Mesh) -> None:
    Picky.packed = 0
    one, other = [Picky()], [Picky()]
    values = zrpc.each([one, other, one, other])
    zrpc.rpc_sync(zrpc.group("*"), lambda *_: None, ([Picky()], values, zrpc.each(range(4))))
    assert Picky.packed == 3


def test_a_tensor_lies_once_in_shared_memory(caller: Mesh) -> None:
    before, tensor = shared_bytes(), large(1)
    assert zrpc.rpc_sync(zrpc.group("worker[123]"), total, (tensor,)) == [tensor.sum().item()] * 3
    assert LARGE_BYTES <= shared_bytes() - before < LARGE_BYTES + 10_000
    groups = zrpc.stats().groups
    assert LARGE_BYTES <= groups.bytes_packed < LARGE_BYTES + 10_000
    assert groups.bytes_sent == groups.bytes_packed
    until_returned(service_of(caller, 0))
    assert zrpc.rpc_sync(zrpc.group("worker[123]"), total, (tensor,)) == [tensor.sum().item()] * 3
    assert len(service_of(caller, 0).pool) == 1  # the segment is used again
    until_returned(service_of(caller, 0))


def test_large_arrays_and_pickles_too(caller: Mesh) -> None:
    numpy = pytest.importorskip("numpy")
    before, text = shared_bytes(), "x" * MIB
    array = numpy.arange(LARGE_BYTES // 8)
    found = zrpc.rpc_sync(zrpc.group("worker[123]"), lambda a, t: (int(a.sum()), t), (array, text))
    assert found == [(int(array.sum()), text)] * 3
    assert shared_bytes() - before < 2 * LARGE_BYTES + 20_000
    until_returned(service_of(caller, 0))


@pytest.mark.zrpc(options={"rpc_timeout": 40, "shared_memory": 3 * MIB})
def test_a_full_pool(caller: Mesh) -> None:
    """What members keep fills it: from then on, tensors go by frames."""
    group = zrpc.group("worker[12]")
    kept = zrpc.remote(group, list, ([],))
    for number in range(6):
        kept.rpc_sync().append(large(number))
    for number in range(6):
        for values in kept.rpc_sync().__getitem__(number):
            assert torch.equal(values, large(number))
    kept.rpc_sync().clear()
    until_returned(service_of(caller, 0))


@pytest.mark.parametrize("waits", [True, False])
def test_a_program_may_raise_the_error_of_a_member(caller: Mesh, waits: bool) -> None:
    """What the others have returned is freed nevertheless."""

    def make(number: int) -> torch.Tensor:
        if number == 2:
            raise LookupError("not here")
        return large(number)

    def call() -> None:
        try:
            future = zrpc.rpc_async(zrpc.group("*"), make, (zrpc.each(range(4)),))
            if waits:
                future.wait()
            else:
                next(zrpc.as_completed([future])).wait()
        except zrpc.GroupError as error:
            raise error.errors[2]  # noqa: B904

    with contextlib.suppress(LookupError):
        call()
    for worker in (1, 3):
        until_returned(service_of(caller, worker))


SAME, SWAPPED = {"fake:0": "fake:0"}, {"fake:0": "fake:1", "cpu": "fake:0"}


@pytest.fixture
def device() -> FakeDevice:
    return fake_device()


def devices_of(*values: torch.Tensor) -> list[str]:
    return [str(value.device) for value in values]


def copies(operations: list[Operation]) -> list[str]:
    return [each.name for each in operations if each.name in ("to_cpu", "from_cpu")]


def call(agents: list[Agent], *members: str, args: Any) -> list[Any]:
    with agents[0].as_current():
        return zrpc.rpc_sync(zrpc.group(members), devices_of, args)


@pytest.mark.parametrize("size", [3, 100_000])
def test_members_with_the_same_map_share_a_packing(device: FakeDevice, size: int) -> None:
    maps = {"worker1": SAME, "worker2": SAME, "worker3": SWAPPED}
    tensors = torch.ones(size).to("fake:0"), torch.ones(size)
    with joined({"device_maps": maps}, {}, {}, {}) as agents:
        with device.record() as operations:
            found = call(agents, "worker1", "worker2", args=tensors)
        assert found == [["fake:0", "cpu"]] * 2
        assert sorted(copies(operations)) == ["from_cpu", "from_cpu", "to_cpu"]
        with device.record() as operations:
            found = call(agents, "worker1", "worker2", "worker3", "worker0", args=tensors)
        assert found == [
            *[["fake:0", "cpu"]] * 2,
            ["fake:1", "fake:0"],
            ["fake:0", "cpu"],
        ]
        assert copies(operations).count("to_cpu") == 3


def test_each_member_gets_its_own_values_by_its_own_map(device: FakeDevice) -> None:
    with joined({"device_maps": {"worker1": SAME, "worker2": SWAPPED}}, {}, {}) as agents:
        x = torch.arange(4.0).to("fake:0")
        for args in ((zrpc.split(x),), (zrpc.each([x, x]),)):
            assert call(agents, "worker1", "worker2", args=args) == [["fake:0"], ["fake:1"]]
