"""Modules on devices of other workers, with and without a device map."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import zrpc as rpc
from tests.support.agents import joined
from zrpc.nn import RemoteModule
from zrpc.testing import fake_device

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _caller() -> Iterator[None]:
    """The test itself is worker0. It has a map for worker1, and none for worker2."""
    fake_device()
    maps = {"worker1": {"fake:0": "fake:1"}}
    with joined({"device_maps": maps}, {}, {}) as agents, agents[0].as_current():
        yield


def test_without_a_map_arguments_and_results_are_on_the_cpu() -> None:
    module = RemoteModule("worker2/fake:1", torch.nn.Linear, (3, 2))
    for result in (module(torch.ones(4, 3)), module.forward_async(torch.ones(4, 3)).wait()):
        assert (result.device, result.shape) == (CPU, (4, 2))
    assert {each.device for each in module.state_dict().values()} == {CPU}
    (where,) = {str(device) for device in rpc.rpc_sync("worker2", devices, (module,))}
    assert where == "fake:1"


def test_with_a_map_arguments_may_be_on_a_device_and_results_come_back_to_it() -> None:
    module = RemoteModule("worker1/fake:1", torch.nn.Linear, (3, 2))
    here = torch.device("fake:0")
    for x in (torch.ones(4, 3), torch.ones(4, 3).to(here)):
        assert module(x).device == here
        assert module.forward_async(x).wait().device == here
    assert {each.device for each in module.state_dict().values()} == {here}


def test_a_state_that_was_fetched_can_be_loaded() -> None:
    for place in ("worker1/fake:1", "worker2/fake:0"):
        module, other = (RemoteModule(place, torch.nn.Linear, (3, 2)) for _ in range(2))
        other.load_state_dict(module.state_dict())
        for name, value in module.state_dict().items():
            assert torch.equal(other.state_dict()[name].cpu(), value.cpu())


def test_a_module_moves_to_a_device_and_back() -> None:
    module = RemoteModule("worker2/cpu", torch.nn.Linear, (3, 2))
    for place in ("fake:1", "cpu"):
        module.to(place)
        assert module.device == place
        assert module(torch.ones(4, 3)).device == CPU


def devices(module: RemoteModule) -> list[torch.device]:
    return [each.device for each in module.module_rref.local_value().parameters()]
