"""Calls of groups whose members have different device maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.agents import joined
from zrpc.agent.agent import Agent
from zrpc.testing import FakeDevice, Operation, fake_device

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
        return rpc.rpc_sync(rpc.group(members), devices_of, args)


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_packing_is_shared_by_members_with_the_same_map_only(
    device: FakeDevice, size: int
) -> None:
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
        for args in ((rpc.split(x),), (rpc.each([x, x]),)):
            assert call(agents, "worker1", "worker2", args=args) == [["fake:0"], ["fake:1"]]
