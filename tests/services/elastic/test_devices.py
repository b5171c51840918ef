"""Device maps of workers that join a running mesh, or are restarted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.services.elastic.conftest import Elastic
from zrpc.agent.agent import Agent
from zrpc.testing import fake_device

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _device() -> None:
    fake_device()


def mapped(to: str, device: str = "fake:1") -> dict[str, Any]:
    return {"device_maps": {to: {"fake:0": device}}}


def device_of(tensor: torch.Tensor) -> str:
    return str(tensor.device)


def arrives_on(agent: Agent, to: str) -> str:
    with agent.as_current():
        tensor = torch.ones(3).to("fake:0")
        assert rpc.rpc_sync(to, torch.neg, (tensor,)).device == tensor.device
        return rpc.rpc_sync(to, device_of, (tensor,))


def test_maps_hold_for_workers_that_join_later(elastic: Elastic) -> None:
    first = elastic.join("w0", 0, options=mapped("late"))
    late = elastic.join("late", options=mapped("*", "cpu"))
    assert arrives_on(first, "late") == "fake:1"
    assert arrives_on(late, "w0") == "cpu"
    elastic.join("other")
    with pytest.raises(rpc.SerializationError, match="destination other"):
        arrives_on(first, "other")


def test_a_worker_whose_devices_do_not_fit_a_map_does_not_join(elastic: Elastic) -> None:
    first = elastic.join("w0", 0, options=mapped("lacks", "fake:5"))
    for name, options, text in (
        ("late", mapped("w0", "fake:2"), "Node late has target devices with invalid indices"),
        ("late", {"devices": ["fake:7"]}, "Node late has devices with invalid indices"),
        ("lacks", {}, "Node w0 has target devices .* in its device map for lacks"),
    ):
        with pytest.raises(ValueError, match=text):
            elastic.join(name, options=options)
    late = elastic.join("late", options=mapped("w0"))
    assert arrives_on(late, "w0") == "fake:1"
    assert [info.name for info in first.get_worker_infos()] == ["w0", "late"]
