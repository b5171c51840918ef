"""Calls between processes that share one device: CUDA's if there is a GPU, and the fake one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.gpu import work
from tests.support.targets import echo
from zrpc.nn import RemoteModule
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(timeout=240)
SMALL, LARGE = 3, 1_000_000


def kinds(device: str) -> list[Any]:
    base = torch.arange(24.0).reshape(2, 3, 2, 2).to(device)
    return [
        base,
        base.to(torch.bfloat16),
        base.to(memory_format=torch.channels_last),
        base.transpose(0, 1),
        [base, base[0], base.flatten()],
        torch.nn.Parameter(base),
        torch.empty(0, 3, device=device),
        torch.tensor([1 + 2j], device=device).conj(),
        torch.eye(3).to_sparse().to(device),
        [base, torch.ones(2), torch.ones((), device=device)],
    ]


def arrive(expected: list[Any], value: Any) -> tuple[bool, Any]:
    return work.describe(value) == expected, value


def items(device: str) -> Iterator[torch.Tensor]:
    for size in (SMALL, LARGE):
        yield torch.ones(size, device=device)


def test_tensors_of_all_kinds_arrive_and_come_back(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        for value in kinds(device):
            expected = work.describe(value)
            arrived, back = rpc.rpc_sync(1, arrive, (expected, value))
            assert arrived
            assert work.describe(back) == expected

    gpu_mesh.run(0, call)


def test_references_streams_and_queues(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        rref = rpc.remote(1, torch.ones, (LARGE,), {"device": device})
        work.on(device, rref.to_here(), rref.rpc_sync().mul(2))
        assert [each.sum().item() for each in rpc.rpc_stream(1, items, (device,))] == [SMALL, LARGE]
        queue = rpc.remote(1, rpc.Queue).rpc_sync()
        queue.put(torch.ones(LARGE, device=device))
        assert queue.get().sum().item() == LARGE

    gpu_mesh.run(0, call)


def test_a_step_is_that_of_one_process(gpu_mesh: Mesh, device: str) -> None:
    def step() -> None:
        torch.manual_seed(0)
        here = torch.nn.Linear(8, 8).to(device)
        weight = rpc.remote(1, torch.ones, (8, 8), {"device": device, "requires_grad": True})
        x = torch.rand(4, 8).to(device)

        alone = weight.to_here().detach().requires_grad_()
        (here(x) @ alone).sum().backward()
        assert alone.grad is not None
        expected = [here.weight.grad, alone - 0.1 * alone.grad]

        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
        with dist_autograd.context() as context_id:
            loss = weight.rpc_sync().__rmatmul__(here(x)).sum()
            dist_autograd.backward(context_id, [loss])
            gradient = dist_autograd.get_gradients(context_id)[here.weight]
            optimizer.step(context_id)
        found = [gradient, weight.to_here()]
        work.on(device, *found)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other)

    gpu_mesh.run(0, step)


def test_a_remote_module_is_placed_there(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        module = RemoteModule(f"worker1/{device}", torch.nn.Linear, (8, 2))
        work.on(device, module(torch.ones(4, 8, device=device)))
        rpc.rpc_sync(1, work.on, (device, *module.remote_parameters()[0].to_here()[:0]))

    gpu_mesh.run(0, call)


def load(device: str, versions: int) -> None:
    model = torch.nn.Linear(1000, 1000, device=device)
    with rpc.nn.subscribe("policy") as policy:
        for version in range(1, versions + 1):
            number = policy.load_into(model, at_least=version)
            assert (model.weight == number).all()


def test_weights_are_handed_out(gpu_mesh: Mesh, device: str) -> None:
    def push() -> None:
        model = torch.nn.Linear(1000, 1000, device=device)
        with rpc.nn.publish("policy", model) as published:
            loads = [rpc.rpc_async(other, load, (device, 40)) for other in (1, 2)]
            for version in range(1, 41):
                with torch.no_grad():
                    model.weight.fill_(version)
                published.push()
            rpc.wait_all(loads)

    gpu_mesh.run(0, push)


@pytest.mark.parametrize("synchronizes", [False, True])
def test_many_threads_call_while_another_process_uses_the_device(
    gpu_mesh: Mesh, device: str, synchronizes: bool
) -> None:
    def one(number: int) -> None:
        size = LARGE if number % 4 == 0 else SMALL
        tensor = torch.full((size,), float(number), device=device)
        result = rpc.rpc_sync(number % 3, work.double, (tensor,))
        if synchronizes:
            torch.get_device_module(device).synchronize()
        work.on(device, result)
        assert (result == 2 * number).all()

    def call() -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(64)))

    burning = gpu_mesh.submit(2, work.burn, device)
    assert gpu_mesh.run(0, rpc.rpc_sync, 2, work.await_burning)
    gpu_mesh.run(0, call)
    gpu_mesh.run(0, rpc.rpc_sync, 2, work.set_stop)
    assert burning.result() > 0


def test_a_callee_without_memory_fails_that_call_alone(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        size = 64 * 2**20
        tensor = torch.ones(size // 4).to(device)
        rpc.rpc_sync(1, work.limit_memory, (device, size // 2))
        with pytest.raises(torch.OutOfMemoryError):
            rpc.rpc_sync(1, torch.numel, (tensor,))
        assert rpc.rpc_sync(1, torch.numel, (torch.ones(SMALL, device=device),)) == SMALL
        rpc.rpc_sync(1, work.lift_limit, (device,))
        assert rpc.rpc_sync(1, torch.numel, (tensor,)) == size // 4

    gpu_mesh.run(0, call)


def test_a_worker_that_dies_takes_no_other_call_with_it(gpu_mesh: Mesh, device: str) -> None:
    def call() -> None:
        tensor = torch.ones(LARGE, device=device)
        with pytest.raises(rpc.WorkerDied):
            rpc.rpc_sync(2, work.burn, (device,))
        assert rpc.rpc_sync(1, echo, (tensor,)).sum().item() == LARGE

    calls = gpu_mesh.submit(0, call)
    assert gpu_mesh.run(1, rpc.rpc_sync, 2, work.await_burning)
    gpu_mesh.kill(2)
    calls.result()
