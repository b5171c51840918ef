"""Gradients of tensors on devices: each arrives on the device of its tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.support.agents import joined
from zrpc.agent.agent import Agent
from zrpc.optim import clip_grad_norm_
from zrpc.testing import fake_device

fake_device()
ZERO = torch.device("fake:0")
LARGE = 100_000


@pytest.fixture(scope="module", autouse=True)
def agent() -> Iterator[Agent]:
    """The test itself is worker0.

    It has a map for worker1, which has a map that moves all to the CPU of worker2.
    """
    zero = {"device_maps": {"worker1": {"fake:0": "fake:0"}}}
    one = {"device_maps": {"worker2": {"fake:0": "cpu"}}}
    with joined(zero, one, {}) as agents, agents[0].as_current():
        yield agents[0]


def leaf(size: int = 3, device: str = "fake:0") -> torch.Tensor:
    return torch.ones(size).to(device).requires_grad_()


def gradients(loss: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss()])
        found = dist_autograd.get_gradients(context_id)
        return [found[leaf] for leaf in leaves]


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def square_on_worker2(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", square, (x,)) + x


def test_gradients_arrive_on_the_devices_of_their_tensors() -> None:
    """Across workers whose devices differ."""
    x, y, large = leaf(), leaf(device="cpu"), leaf(LARGE)

    def loss() -> torch.Tensor:
        there = rpc.rpc_sync("worker1", square_on_worker2, (x,))
        again = rpc.rpc_sync("worker1", square, (there * x,))
        on_device = again.sum() + rpc.rpc_sync("worker1", square, (large,)).sum()
        return on_device.cpu() + rpc.rpc_sync("worker1", square, (y,)).sum()

    found = gradients(loss, x, y, large)
    assert [each.device for each in found] == [ZERO, torch.device("cpu"), ZERO]
    # (x**3 + x**2)**2 at 1, and 2 y
    assert found[0].tolist() == [20.0] * 3
    assert found[1].tolist() == [2.0] * 3
    assert torch.equal(found[2].cpu(), torch.full((LARGE,), 2.0))


def test_gradients_on_a_device_are_clipped() -> None:
    x, y = leaf(), leaf(device="cpu")
    rrefs = [rpc.RRef(x), rpc.RRef(y)]
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", square, (x,)).sum().cpu() + y.sum()
        dist_autograd.backward(context_id, [loss])
        norm = clip_grad_norm_(context_id, rrefs, 1.0)
        found = dist_autograd.get_gradients(context_id)
    torch.testing.assert_close(norm, torch.tensor(15.0).sqrt())
    assert found[x].device == ZERO
    for each, before in ((found[x].cpu(), 2.0), (found[y], 1.0)):
        torch.testing.assert_close(each, torch.full((3,), before) / norm)


def test_a_hook_on_a_device_tensor_may_call_a_worker(agent: Agent) -> None:
    """It runs in a thread of torch's engine, as nodes of devices do."""
    x = leaf()
    called = []

    def hook(gradient: torch.Tensor) -> None:
        with agent.as_current():
            called.append(rpc.rpc_sync("worker1", square, (gradient.detach(),)).tolist())

    def loss() -> torch.Tensor:
        y = rpc.rpc_sync("worker1", square, (x,))
        y.register_hook(hook)
        return (y * 3).sum()

    gradients(loss, x)
    assert called == [[9.0] * 3]
