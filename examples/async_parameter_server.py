"""An asynchronous parameter server: every trainer works at its own pace.

What it shows: an RRef to an object that many workers call at the same time, and the lock that
the object needs. Trainers pull the parameters, compute gradients, and push them, without waiting
for one another. Other trainers may have updated the parameters between a pull and its push; the
server counts these updates, which is called staleness. Gradients are computed where the data is;
no autograd graph crosses workers.

It corresponds to "Implementing a Parameter Server Using Distributed RPC Framework" in PyTorch's
tutorials. The task is to learn the function sin(3a) cos(2b), to a mean squared error below 0.003
on points that no trainer has seen. The variance of that function is about 0.25.

    zrpc launch --nprocs 4 examples/async_parameter_server.py
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter

import torch
from torch import nn
from torch.nn import functional

import zrpc as rpc

LEARNING_RATE = 0.03
UPDATES_PER_LINE = 100


def make_model() -> nn.Module:
    """Returns the network to train."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def make_points(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points, and the function's value at each."""
    points = 2 * torch.rand(count, 2, generator=generator) - 1
    values = (3 * points[:, :1]).sin() * (2 * points[:, 1:]).cos()
    return points, values


class ParameterServer:
    """Holds the parameters, and decides when to stop.

    Args:
        target: stop when the loss on held-out points is below this.
        max_updates: stop after this number of updates in any case.
        seed: the seed of the model and of the points.
    """

    def __init__(self, target: float, max_updates: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.target = target
        self.max_updates = max_updates
        self.points, self.values = make_points(2000, torch.Generator().manual_seed(seed))
        # Guards all attributes below: calls of several trainers run at the same time, and no
        # trainer must see parameters that are only partly updated.
        self.lock = threading.Lock()
        self.model = make_model()
        self.parameters = list(self.model.parameters())
        # Adagrad's steps only get smaller. Adam and momentum overshoot on stale gradients.
        self.optimizer = torch.optim.Adagrad(self.parameters, LEARNING_RATE)
        self.updates = 0
        self.loss = float("inf")
        self.pushes: Counter[str] = Counter()
        self.staleness: Counter[str] = Counter()

    def pull(self) -> tuple[int, list[torch.Tensor]]:
        """Returns the number of updates so far, and copies of the parameters."""
        with self.lock:
            return self.updates, [parameter.detach().clone() for parameter in self.parameters]

    def push(self, trainer: str, version: int, gradients: list[torch.Tensor]) -> bool:
        """Applies gradients; returns whether to continue.

        Args:
            trainer: the name of the trainer that computed them.
            version: the number of updates in the parameters that the trainer used.
            gradients: one for each parameter.
        """
        with self.lock:
            if self._is_done():
                return False
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.pushes[trainer] += 1
            self.staleness[trainer] += self.updates - version
            self.updates += 1
            if self.updates % UPDATES_PER_LINE == 0:
                self._measure()
            return not self._is_done()

    def _is_done(self) -> bool:
        return self.loss < self.target or self.updates >= self.max_updates

    @torch.no_grad()
    def _measure(self) -> None:
        self.loss = functional.mse_loss(self.model(self.points), self.values).item()
        print(f"{self.updates:6d} updates, loss {self.loss:.4f}", flush=True)


def train(server: rpc.RRef[ParameterServer], index: int, seed: int) -> None:
    """On a trainer: pulls and pushes until the server says to stop."""
    torch.set_num_threads(1)  # a small network, and every worker has one
    model = make_model()
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(seed + 1 + index)
    minibatch = 64 * (1 + 8 * index)  # each trainer is slower than the one before
    name = rpc.get_worker_info().name
    running = True
    while running:
        version, values = server.rpc_sync().pull()
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        points, wanted = make_points(minibatch, generator)
        loss = functional.mse_loss(model(points), wanted)
        gradients = list(torch.autograd.grad(loss, parameters))
        running = server.rpc_sync().push(name, version, gradients)


def run(trainers: list[str], options: argparse.Namespace) -> str | None:
    """On the server: runs all trainers; returns why the target was not reached, if it wasn't."""
    server = ParameterServer(options.target, options.max_updates, options.seed)
    rref = rpc.RRef(server)
    futures = [
        rpc.rpc_async(name, train, args=(rref, index, options.seed), timeout=0)
        for index, name in enumerate(trainers)
    ]
    for future in futures:
        future.wait()
    for name in trainers:
        pushes = server.pushes[name]
        mean = server.staleness[name] / max(pushes, 1)
        print(f"{name}: {pushes} gradients, each {mean:.1f} updates old on average")
    result = f"{options.target:g} after {server.updates} updates; the loss is {server.loss:.4f}."
    if server.loss >= options.target:
        return f"Not below {result}"
    print(f"Below {result}", flush=True)
    return None


def main() -> None:
    """Runs this worker: the parameter server if its rank is 0, otherwise a trainer."""
    parser = argparse.ArgumentParser(description="Train asynchronously, with a parameter server.")
    parser.add_argument("--target", type=float, default=0.003, help="default: %(default)s")
    parser.add_argument("--max-updates", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 2:
        parser.error("expected at least 2 workers, a server and a trainer: use zrpc launch -n 4")
    names = ["server", *(f"trainer{index}" for index in range(1, world_size))]
    rpc.init_rpc(names[rank])
    failure = run(names[1:], options) if rank == 0 else None
    rpc.shutdown()  # trainers answer calls here until the server is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
