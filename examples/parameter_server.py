"""A parameter server with several trainers that go forward and backward through it.

What it shows: many autograd contexts at once over the same parameters. The server has the model.
Each trainer has data, calls the model with it, and computes the loss next to the labels. Its
backward pass ends at the server, where the gradients stay in the trainer's own context until its
own optimizer steps. No trainer waits for another.

So parameters may change between a trainer's forward pass and its backward pass, which autograd
forbids for tensors that it has saved. The server therefore computes with copies made inside the
graph: the copies do not change, and gradients flow through them to the parameters.

It corresponds to "Implementing a Parameter Server Using Distributed RPC Framework" in PyTorch's
tutorials; see async_parameter_server.py for the same idea without distributed autograd. The task
is to tell which module of Python's standard library a line of source code is from. A tenth of the
lines is kept from the trainers, to test the model.

    zrpc launch --nprocs 4 examples/parameter_server.py
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import threading
import zlib
from functools import cache

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import zrpc as rpc
import zrpc.autograd as dist_autograd
from zrpc.optim import DistributedOptimizer

MODULES = ["argparse", "tarfile", "inspect", "pickle", "subprocess", "typing"]
BUCKETS = 5000  # for the hashes of the parts of a line
PART = 4  # characters
MINIBATCH = 64
LEARNING_RATE = 0.003
STEPS_PER_LINE = 50

Lines = list[torch.Tensor]


@cache
def make_data() -> tuple[list[Lines], list[torch.Tensor]]:
    """Returns lines and the numbers of their modules: for training first, then for testing."""
    lines: list[Lines] = [[], []]
    labels: list[list[int]] = [[], []]
    for number, name in enumerate(MODULES):
        source = inspect.getsource(importlib.import_module(name))
        texts = [line.strip() for line in source.splitlines() if len(line.strip()) >= 20]
        for index, text in enumerate(texts):
            parts = [text[i : i + PART].encode() for i in range(len(text) - PART + 1)]
            which = int(index % 10 == 0)
            lines[which].append(torch.tensor([zlib.crc32(part) % BUCKETS for part in parts]))
            labels[which].append(number)
    return lines, [torch.tensor(numbers) for numbers in labels]


def flat(lines: Lines) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the parts of all lines, and the index at which each line begins."""
    lengths = torch.tensor([0, *(len(line) for line in lines)])
    return torch.cat(lines), lengths.cumsum(0)[:-1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.EmbeddingBag(BUCKETS, 32)
        self.rest = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, len(MODULES)))

    def forward(self, parts: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.rest(self.parts(parts, starts))
        return scores


class ParameterServer:
    """Holds the model; all trainers call its methods at the same time.

    Args:
        seed: the seed of the model.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.parameters = dict(self.model.named_parameters())
        # Held while functional_call has put copies in the place of the model's parameters.
        self.lock = threading.Lock()

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """Returns RRefs of the parameters, for an optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters.values()]

    def forward(self, parts: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Returns the scores of each line for each module."""
        copies = {name: parameter.clone() for name, parameter in self.parameters.items()}
        with self.lock:
            scores: torch.Tensor = functional_call(self.model, copies, (parts, starts))
        return scores

    @torch.no_grad()
    def accuracy(self) -> float:
        """Returns the accuracy on the lines that no trainer has seen."""
        (_, lines), (_, labels) = make_data()
        return (self.forward(*flat(lines)).argmax(1) == labels).float().mean().item()


def train(server: rpc.RRef[ParameterServer], steps: int, seed: int) -> float:
    """On a trainer: returns the mean loss of the last steps."""
    (lines, _), (labels, _) = make_data()
    generator = torch.Generator().manual_seed(seed + rpc.get_worker_info().id)
    parameters = server.rpc_sync().parameter_rrefs()
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=LEARNING_RATE)
    losses = []
    for step in range(1, steps + 1):
        chosen = torch.randint(len(lines), (MINIBATCH,), generator=generator)
        with dist_autograd.context() as context_id:
            scores = server.rpc_sync().forward(*flat([lines[i] for i in chosen]))
            loss = functional.cross_entropy(scores, labels[chosen])
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        if step % STEPS_PER_LINE == 0:
            mean = sum(losses[-STEPS_PER_LINE:]) / STEPS_PER_LINE
            print(f"step {step:4d}   loss {mean:.3f}", flush=True)
    return sum(losses[-STEPS_PER_LINE:]) / len(losses[-STEPS_PER_LINE:])


def run(trainers: list[str], options: argparse.Namespace) -> str | None:
    """On the server: runs all trainers; returns what is wrong with the result, if anything."""
    server = ParameterServer(options.seed)
    rref = rpc.RRef(server)
    before = server.accuracy()
    arguments = (rref, options.steps, options.seed)
    futures = [rpc.rpc_async(name, train, args=arguments, timeout=0) for name in trainers]
    for name, future in zip(trainers, futures, strict=True):
        print(f"{name}: the loss is {future.wait():.3f} at the end")
    accuracy = server.accuracy()
    print(f"right for {before:.1%} of unseen lines before, {accuracy:.1%} after", flush=True)
    return None if accuracy >= 0.5 else "Expected an accuracy of at least 50%."


def main() -> None:
    """Runs this worker: the parameter server if its rank is 0, otherwise a trainer."""
    parser = argparse.ArgumentParser(description="Train through a parameter server.")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 2:
        parser.error("expected at least 2 workers, a server and a trainer: use zrpc launch -n 4")
    torch.set_num_threads(1)  # a small model, and every worker computes
    names = ["server", *(f"trainer{index}" for index in range(1, world_size))]
    rpc.init_rpc(names[rank])
    failure = run(names[1:], options) if rank == 0 else None
    rpc.shutdown()  # trainers answer calls here until the server is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
