"""A mixture of experts that live on other workers.

What it shows: `RemoteModule`, calls to many workers at the same time, and graphs that differ from
step to step. A gate on the trainer sends each row of a minibatch to the two experts that it rates
best, and an expert gets its own rows only. Their results are added to the input, twice in a
row::

    x  ->  x + two of experts(x)  ->  x + two of experts(x)  ->  scores

So one graph visits a worker several times or not at all, and has a path around the experts too.
One backward pass covers all of that, and the gates, which learn from the weight that they gave to
each expert.

It corresponds to the remote modules of "Distributed RPC Framework" in PyTorch's documentation and
to N. Shazeer et al., "Outrageously Large Neural Networks" (2017). The task has four rules, one for
each region of the points: a line divides the region in two.

    zrpc launch --nprocs 4 examples/mixture_of_experts.py
    zrpc launch --nprocs 4 examples/mixture_of_experts.py --check

With ``--check`` the same model is trained again without zrpc, in one process and from the same
seeds. The losses must be the same, except for rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

import zrpc as rpc
import zrpc.autograd as dist_autograd
from zrpc.nn import RemoteModule
from zrpc.optim import DistributedOptimizer

REGIONS = 4
WIDTH = 16
HOPS = 2
TOP = 2  # experts for each row
MINIBATCH = 128
LEARNING_RATE = 0.01
BALANCE = 0.05  # the weight, beside the loss, of an uneven choice of experts
STEPS_PER_LINE = 50

# Takes the rows for one expert; returns a function that waits for the result.
Ask = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


class Expert(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(rows)
        return result


class Trainer(nn.Module):
    """The trainer's part of the model: all but the experts.

    Args:
        experts: a function for each expert, which sends rows to it.
        seed: the seed of the parameters.
    """

    def __init__(self, experts: Sequence[Ask], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts = experts
        self.first = nn.Linear(2, WIDTH)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, len(experts)) for _ in range(HOPS))
        self.last = nn.Linear(WIDTH, 2)
        self.rows = [0] * len(experts)  # the number sent to each expert so far

    def forward(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scores, and how unevenly the experts were chosen: 0 for evenly."""
        x = self.first(points).tanh()
        uneven = x.new_zeros(())
        for gate in self.gates:
            probabilities = gate(x).softmax(1)
            x = x + self._ask(x, probabilities)
            uneven = uneven + (probabilities.mean(0) * len(self.experts) - 1).square().mean()
        return self.last(x), uneven

    def _ask(self, x: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns the weighted results of the best experts for each row."""
        weights, chosen = probabilities.topk(TOP, 1)
        asked = []
        for number, ask in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):  # otherwise this expert isn't part of the graph
                asked.append((ask(x[rows]), rows, weights[rows, places, None]))
                self.rows[number] += len(rows)
        total = torch.zeros_like(x)
        for result, rows, weight in asked:
            total = total.index_add(0, rows, weight * result())
        return total


def make_points(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points in a square, and each point's side of its region's line."""
    points = 2 * torch.rand(MINIBATCH, 2, generator=generator) - 1
    regions = (points > 0).long() @ torch.tensor([2, 1])
    angles = regions * torch.pi / REGIONS + 0.3
    inside = points - points.sign() / 2
    sides = inside[:, 0] * angles.cos() + inside[:, 1] * angles.sin() > 0
    return points, sides.long()


def remote_ask(expert: RemoteModule) -> Ask:
    return lambda rows: expert.forward_async(rows).wait


def local_ask(expert: nn.Module) -> Ask:
    def ask(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        result = expert(rows)
        return lambda: result

    return ask


def train(workers: list[str], steps: int, seed: int) -> list[float]:
    """On the trainer: returns the loss of each step."""
    experts = [
        RemoteModule(f"{name}/cpu", Expert, args=(seed + 1 + i,)) for i, name in enumerate(workers)
    ]
    model = Trainer([remote_ask(expert) for expert in experts], seed)
    parameters = [rpc.RRef(parameter) for parameter in model.parameters()]
    parameters += [rref for expert in experts for rref in expert.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(1, steps + 1):
        points, sides = make_points(generator)
        with dist_autograd.context() as context_id:
            scores, uneven = model(points)
            loss = functional.cross_entropy(scores, sides)
            dist_autograd.backward(context_id, [loss + BALANCE * uneven])
            optimizer.step(context_id)
        losses.append(loss.item())
        if step % STEPS_PER_LINE == 0:
            mean = sum(losses[-STEPS_PER_LINE:]) / STEPS_PER_LINE
            print(f"step {step:4d}   loss {mean:.3f}", flush=True)
    for name, rows in zip(workers, model.rows, strict=True):
        print(f"{name} was given {rows / sum(model.rows):.0%} of the rows", flush=True)
    return losses


def train_in_one_process(experts: int, steps: int, seed: int) -> list[float]:
    """Trains without zrpc; returns the loss of each step."""
    modules = [Expert(seed + 1 + i) for i in range(experts)]
    model = Trainer([local_ask(module) for module in modules], seed)
    parameters = [p for module in (model, *modules) for p in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        points, sides = make_points(generator)
        scores, uneven = model(points)
        loss = functional.cross_entropy(scores, sides)
        optimizer.zero_grad()
        (loss + BALANCE * uneven).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(workers: list[str], options: argparse.Namespace) -> str | None:
    """On the trainer: trains; returns what went wrong, if anything."""
    losses = train(workers, options.steps, options.seed)
    if options.check:
        expected = train_in_one_process(len(workers), options.steps, options.seed)
        largest = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"largest difference of a loss to one process: {largest:.1e}", flush=True)
        if largest > 1e-6:
            return "The losses differ by more than rounding."
    return None


def main() -> None:
    """Runs this worker: the trainer if its rank is 0, otherwise an expert."""
    parser = argparse.ArgumentParser(description="Train a mixture of remote experts.")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 3:
        parser.error("expected at least 3 workers, a trainer and two experts: use zrpc launch -n 4")
    # With coarser numbers, a rounding error could send a row that the gate rates nearly equal for
    # two experts to the other one, and two runs could not be compared.
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # small experts, and every worker has one
    names = ["trainer", *(f"expert{index}" for index in range(1, world_size))]
    rpc.init_rpc(names[rank])
    failure = run(names[1:], options) if rank == 0 else None
    rpc.shutdown()  # experts answer calls here until the trainer is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
