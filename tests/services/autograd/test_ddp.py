"""DistributedDataParallel inside of a context: it averages gradients over its processes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.agent.current import current_agent
from zrpc.testing import Mesh

# Two trainers, and the worker that has the embedding. A gloo group leaves descriptors behind, in
# any process that has used DDP.
pytestmark = pytest.mark.zrpc(workers=3, processes=True, timeout=90, leaks=False)

STEPS = 3
RATE = 0.5


def dense() -> Any:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    ).double()


def table(sparse: Any) -> Any:
    # Not by the global generator: both trainers may ask for the table at once, in two threads.
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    return torch.nn.Embedding(10, 4, sparse=sparse, _weight=weight)


def batch(rank: Any, step: Any) -> Any:
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = torch.randint(0, 10, (6,), generator=generator)
    return rows, torch.randn(6, 2, generator=generator, dtype=torch.float64)


def loss_of(output: Any, target: Any) -> Any:
    return torch.nn.functional.mse_loss(output, target)


class Table(torch.nn.Module):
    """The embedding at its worker; it adds the gradients of all trainers up."""

    def __init__(self, sparse: Any) -> None:
        super().__init__()
        self.embedding = table(sparse)
        # Guards a descent: both trainers ask for theirs at once, and neither may get lost.
        self.lock = threading.Lock()

    def forward(self, rows: Any) -> Any:
        return self.embedding(rows)

    def gradient(self, context_id: Any) -> Any:
        found = dist_autograd.get_gradients(context_id)
        assert set(found) == {self.embedding.weight}
        return found[self.embedding.weight].to_dense()

    def descend(self, gradient: Any) -> None:
        with self.lock, torch.no_grad():
            self.embedding.weight -= RATE * gradient


def in_group(path: Any, fn: Any, *args: Any) -> Any:
    """Calls ``fn(rank, *args)`` within a process group of the trainers."""
    rank = current_agent().worker_info.id
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        return fn(rank, *args)
    finally:
        dist.destroy_process_group()


def trainer(rank: Any, sparse: Any, options: Any) -> Any:
    """Trains; gives the gradients and the loss of each step."""
    embedding = zrpc.rpc_sync("worker2", find_table, (sparse,))
    plain = dense()
    model = DistributedDataParallel(plain, **options)
    history = []
    for step in range(STEPS):
        rows, target = batch(rank, step)
        with dist_autograd.context() as context_id:
            loss = loss_of(model(embedding.rpc_sync().forward(rows)), target)
            dist_autograd.backward(context_id, [loss])
            found = dist_autograd.get_gradients(context_id)
            gradients = [found[p].clone() for p in plain.parameters()]
            far = embedding.rpc_sync().gradient(context_id)
        assert all(p.grad is None for p in plain.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
        dist.barrier()  # no trainer is still reading the table
        embedding.rpc_sync().descend(far / 2)
        dist.barrier()
        history.append((loss.item(), gradients, far))
    return history


def in_one_process(sparse: Any) -> Any:
    """The same with the mean of both trainers' losses."""
    plain, embedding = dense(), table(sparse)
    parameters = list(plain.parameters())
    history = []
    for step in range(STEPS):
        losses, fars = [], []
        for rank in range(2):
            rows, target = batch(rank, step)
            losses.append(loss_of(plain(embedding(rows)), target))
            [far] = torch.autograd.grad(losses[-1], [embedding.weight], retain_graph=True)
            fars.append(far.to_dense())
        gradients = torch.autograd.grad(sum(losses) / 2, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= RATE * gradient
            embedding.weight -= RATE * sum(fars) / 2
        history.append(([loss.item() for loss in losses], list(gradients), fars))
    return history


@pytest.mark.parametrize(
    ("options", "sparse"),
    [
        ({}, False),
        ({"gradient_as_bucket_view": True}, True),
        ({"bucket_cap_mb": 0.0001}, True),
        ({"find_unused_parameters": True}, False),
    ],
    ids=["plain", "bucket views", "many buckets", "unused parameters"],
)
def test_dense_part_in_ddp_embedding_at_a_worker(
    mesh: Mesh, tmp_path: Path, options: Any, sparse: bool
) -> None:
    futures = [
        mesh.submit(rank, in_group, str(tmp_path / "group"), trainer, sparse, options)
        for rank in range(2)
    ]
    found = [future.result(80) for future in futures]
    expected = in_one_process(sparse)
    for step, (losses, gradients, fars) in enumerate(expected):
        for rank in range(2):
            loss, of_rank, far = found[rank][step]
            torch.testing.assert_close(loss, losses[rank])
            torch.testing.assert_close(of_rank, gradients)
            torch.testing.assert_close(far, fars[rank])


def find_table(sparse: Any) -> Any:
    agent = current_agent()
    return agent.__dict__.setdefault("test_table", zrpc.RRef(Table(sparse)))


def two_modules(rank: Any) -> Any:
    first = DistributedDataParallel(dense())
    second = DistributedDataParallel(torch.nn.Linear(2, 2, bias=False).double())
    with torch.no_grad():
        second.module.weight.copy_(torch.eye(2))
    plain = torch.ones(2, dtype=torch.float64, requires_grad=True)
    x = torch.full((1, 4), float(rank + 1), dtype=torch.float64)
    with dist_autograd.context() as context_id:
        # A call of `forward` runs no hooks of the module.
        far = zrpc.rpc_sync("worker2", torch.tanh, (first.forward(x),))
        dist_autograd.backward(context_id, [(second(far) * plain).sum()])
        found = dist_autograd.get_gradients(context_id)
        of_first = [found[p] for p in first.module.parameters()]
        return of_first, found[second.module.weight], found[plain]


def test_two_ddp_modules_on_both_sides_of_a_hop(mesh: Mesh, tmp_path: Path) -> None:
    futures = [
        mesh.submit(rank, in_group, str(tmp_path / "group"), two_modules) for rank in range(2)
    ]
    found = [future.result(60) for future in futures]
    plain = torch.ones(2, dtype=torch.float64, requires_grad=True)
    first, weight = dense(), torch.eye(2, dtype=torch.float64, requires_grad=True)
    leaves = [*first.parameters(), weight, plain]
    each = []
    for rank in range(2):
        x = torch.full((1, 4), float(rank + 1), dtype=torch.float64)
        loss = (torch.tanh(first(x)) @ weight.t() * plain).sum()
        each.append(torch.autograd.grad(loss, leaves))
    mean = [(a + b) / 2 for a, b in zip(*each, strict=True)]
    for rank, (of_first, of_second, of_plain) in enumerate(found):
        torch.testing.assert_close(of_first, mean[:-2])
        torch.testing.assert_close(of_second, mean[-2])
        torch.testing.assert_close(of_plain, each[rank][-1])
