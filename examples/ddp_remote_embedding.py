"""DistributedDataParallel for the dense part of a model, and an embedding on another worker.

What it shows: two kinds of parallelism in one autograd context. Each of two trainers has a copy
of the small dense layers; DDP averages their gradients over a gloo process group. The large
embedding table exists once, on a parameter worker, and the trainers differentiate through calls
to it. One call of `backward` computes both kinds of gradients, and one optimizer steps on all
workers. A master starts the trainers::

    master --> trainer0 --(calls)--> parameters
           --> trainer1 --(calls)-->
               trainer0 <--(gloo)--> trainer1

It corresponds to "Combining Distributed DataParallel with Distributed RPC Framework" in PyTorch's
tutorials. The task is to find which of four topics most words of a sentence belong to.

    zrpc launch --nprocs 4 examples/ddp_remote_embedding.py
    zrpc launch --nprocs 4 examples/ddp_remote_embedding.py --check

With ``--check`` the same model is trained again without zrpc and DDP, in one process, with the
minibatches of both trainers joined. Losses and parameters must be the same, except for rounding.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import zrpc as rpc
import zrpc.autograd as dist_autograd
from zrpc.nn import RemoteModule
from zrpc.optim import DistributedOptimizer

NAMES = ["trainer0", "trainer1", "master", "parameters"]
TRAINERS = 2
WORDS = 200
LENGTH = 9  # words in a sentence
TOPICS = 4
WIDTH = 16
MINIBATCH = 64  # of each trainer
LEARNING_RATE = 0.5
TABLE_LEARNING_RATE = 40.0  # larger, since a minibatch has few words of the table
STEPS_PER_LINE = 25

Result = tuple[list[float], list[torch.Tensor]]


class Table(nn.EmbeddingBag):
    """The part of the model on the parameter worker."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(WORDS, WIDTH)


def make_dense(seed: int) -> nn.Module:
    """Returns the part of the model that each trainer has."""
    torch.manual_seed(seed + 1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, TOPICS))


def make_minibatch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sentences, and the topic of most words of each."""
    sentences = torch.randint(WORDS, (MINIBATCH, LENGTH), generator=generator)
    counts = functional.one_hot(sentences % TOPICS, TOPICS).sum(1)
    return sentences, counts.argmax(1)


def data_of(trainer: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 10 + trainer)


def train(trainer: int, table: RemoteModule, steps: int, seed: int) -> Result:
    """On a trainer: returns the losses and the final dense parameters."""
    dense = DistributedDataParallel(make_dense(seed))
    # Both trainers step on the table, one after the other, each with the gradient of its own
    # minibatch. Two steps of half the size equal one with the mean gradient, which DDP computes
    # for the dense part.
    groups: list[dict[str, Any]] = [
        {"params": table.remote_parameters(), "lr": TABLE_LEARNING_RATE / TRAINERS},
        {"params": [rpc.RRef(parameter) for parameter in dense.parameters()]},
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD, groups, lr=LEARNING_RATE)
    generator = data_of(trainer, seed)
    losses = []
    for step in range(1, steps + 1):
        sentences, labels = make_minibatch(generator)
        with dist_autograd.context() as context_id:
            loss = functional.cross_entropy(dense(table(sentences)), labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        dist.barrier()  # the next step needs both updates of the table
        losses.append(loss.item())
        if step % STEPS_PER_LINE == 0:
            mean = sum(losses[-STEPS_PER_LINE:]) / STEPS_PER_LINE
            print(f"step {step:4d}   loss {mean:.3f}", flush=True)
    return losses, [parameter.detach() for parameter in dense.parameters()]


def train_in_one_process(steps: int, seed: int) -> tuple[list[float], nn.Module, nn.Module]:
    """Trains without zrpc; returns the losses, the table and the dense part."""
    table, dense = Table(seed), make_dense(seed)
    groups: list[dict[str, Any]] = [
        {"params": table.parameters(), "lr": TABLE_LEARNING_RATE},
        {"params": dense.parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE)
    generators = [data_of(trainer, seed) for trainer in range(TRAINERS)]
    losses = []
    for _ in range(steps):
        parts = [make_minibatch(generator) for generator in generators]
        sentences, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss = functional.cross_entropy(dense(table(sentences)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, table, dense


def run(options: argparse.Namespace) -> str | None:
    """On the master: runs the trainers; returns what is wrong with the result, if anything."""
    table = RemoteModule("parameters/cpu", Table, args=(options.seed,))
    futures = [
        rpc.rpc_async(NAMES[i], train, (i, table, options.steps, options.seed), timeout=0)
        for i in range(TRAINERS)
    ]
    results = [future.wait() for future in futures]
    if not options.check:
        return None
    expected, local_table, local_dense = train_in_one_process(options.steps, options.seed)
    means = [sum(losses) / TRAINERS for losses in zip(*(r[0] for r in results), strict=True)]
    differences = {"loss": max(abs(a - b) for a, b in zip(means, expected, strict=True))}
    weight = table.state_dict()["weight"]
    differences["table"] = (weight - local_table.weight).abs().max().item()
    for trainer, (_, parameters) in enumerate(results):
        pairs = zip(parameters, local_dense.parameters(), strict=True)
        differences[NAMES[trainer]] = max((a - b).abs().max().item() for a, b in pairs)
    for what, largest in differences.items():
        print(f"{what}: largest difference to one process: {largest:.1e}", flush=True)
    return None if max(differences.values()) < 1e-3 else "The differences are larger than rounding."


def main() -> None:
    """Runs this worker: by its rank a trainer, the master, or the parameter worker."""
    parser = argparse.ArgumentParser(description="Train with DDP and a remote embedding.")
    parser.add_argument("--steps", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size != len(NAMES):
        parser.error(f"expected {len(NAMES)} workers, but got {world_size}: use zrpc launch -n 4")
    torch.set_num_threads(1)  # a small model, and every worker computes
    if rank < TRAINERS:
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS)
    rpc.init_rpc(NAMES[rank])
    failure = run(options) if NAMES[rank] == "master" else None
    rpc.shutdown()  # trainers and the parameter worker answer calls here until the master is done
    if rank < TRAINERS:
        gc.collect()  # DDP refers to itself; torch 2.13 may hang if it is last to hold the group
        dist.destroy_process_group()
    sys.exit(failure)


if __name__ == "__main__":
    main()
