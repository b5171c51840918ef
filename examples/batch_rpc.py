"""Batch processing of calls: one update for the gradients of all trainers.

What it shows: ``@rpc.functions.async_execution``. Trainers send gradients to a parameter server
and get new parameters back. The server returns a Future, which completes when a whole batch of
gradients has arrived and was applied. Until then no call holds a thread.

The server runs twice: with batches of one gradient from each trainer, and with batches of one
gradient. The trainers send the same number of gradients in both runs. So batching makes fewer
updates, each from more data and from the latest parameters, but each trainer has to wait for the
slowest. Which run learns more depends on the task: on this small one, the run with more updates.

It corresponds to "Implementing Batch RPC Processing Using Asynchronous Executions" in PyTorch's
tutorials. The task is to tell apart the three arms of a spiral.

    zrpc launch --nprocs 4 examples/batch_rpc.py
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time

import torch
from torch import nn
from torch.nn import functional

import zrpc as rpc

ARMS = 3
POINTS = 3000
MINIBATCH = 64
LEARNING_RATE = 0.01


def make_spiral(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points of a spiral, and the number of each point's arm."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(ARMS, (POINTS,), generator=generator)
    radii = torch.rand(POINTS, generator=generator)
    noise = 0.15 * torch.randn(POINTS, generator=generator)
    angles = 2 * torch.pi * arms / ARMS + 4 * radii + noise
    return torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), arms


def make_model(seed: int) -> nn.Module:
    """Returns the network, which is the same on every worker with this seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, ARMS))


class ParameterServer:
    """Holds the parameters, and updates them from batches of gradients.

    Args:
        batch_size: the number of gradients in an update.
        seed: the seed of the model.
    """

    def __init__(self, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self.model = make_model(seed)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, LEARNING_RATE)
        self.updates = 0
        # Guards the model and the attributes below: calls of several trainers run at once.
        self.lock = threading.Lock()
        self.batch: list[list[torch.Tensor]] = []
        self.updated: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    @rpc.functions.async_execution
    def update(self, gradients: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        """Takes a trainer's gradients; returns a Future of the updated parameters."""
        with self.lock:
            updated = self.updated
            self.batch.append(gradients)
            if len(self.batch) < self.batch_size:
                return updated  # frees this call's thread; the trainer waits
            fresh = self._apply()
            self.batch, self.updated = [], torch.futures.Future()
        # One result answers all calls of the batch.
        updated.set_result(fresh)
        return updated

    def _apply(self) -> list[torch.Tensor]:
        for parameter, *gradients in zip(self.parameters, *self.batch, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        self.optimizer.step()
        self.updates += 1
        # Copies, since the next update may run while these are being sent.
        return [parameter.detach().clone() for parameter in self.parameters]


def train(server: rpc.RRef[ParameterServer], index: int, steps: int, seed: int) -> list[float]:
    """On a trainer: sends the gradients of its minibatches; returns their losses."""
    torch.set_num_threads(1)  # a small network, and every worker has one
    points, arms = make_spiral(seed)
    model = make_model(seed)
    generator = torch.Generator().manual_seed(seed + 1 + index)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(POINTS, (MINIBATCH,), generator=generator)
        loss = functional.cross_entropy(model(points[chosen]), arms[chosen])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        fresh = server.rpc_sync().update(list(gradients))
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), fresh, strict=True):
                parameter.copy_(value)
        losses.append(loss.item())
    return losses


def run(trainers: list[str], batch_size: int, steps: int, seed: int) -> float:
    """On the server: runs all trainers, prints the results and returns the accuracy."""
    server = ParameterServer(batch_size, seed)
    rref = rpc.RRef(server)
    began = time.monotonic()
    futures = [
        rpc.rpc_async(name, train, args=(rref, index, steps, seed), timeout=0)
        for index, name in enumerate(trainers)
    ]
    losses = torch.tensor([future.wait() for future in futures]).mean(0)
    seconds = time.monotonic() - began
    print(f"batches of {batch_size}: {steps} gradients from each of {len(trainers)} trainers")
    for part in losses.tensor_split(5):
        print(f"  loss {part.mean():.3f}")
    points, arms = make_spiral(seed)
    accuracy: float = (server.model(points).argmax(1) == arms).float().mean().item()
    print(f"  {server.updates} updates in {seconds:.2f} s, accuracy {accuracy:.1%}", flush=True)
    return accuracy


def main() -> None:
    """Runs this worker: the parameter server if its rank is 0, otherwise a trainer."""
    parser = argparse.ArgumentParser(description="Train with gradients averaged by batches.")
    parser.add_argument("--steps", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 2:
        parser.error("expected at least 2 workers, a server and a trainer: use zrpc launch -n 4")
    names = ["server", *(f"trainer{index}" for index in range(1, world_size))]
    rpc.init_rpc(names[rank])
    failure = None
    if rank == 0:
        sizes = (len(names) - 1, 1)
        worst = min(run(names[1:], size, options.steps, options.seed) for size in sizes)
        if worst < 0.9:
            failure = f"Expected an accuracy of at least 90% in both runs, but got {worst:.1%}."
    rpc.shutdown()  # trainers answer calls here until the server is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
