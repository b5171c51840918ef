"""A language model that is split over two workers.

What it shows: distributed autograd, and an optimizer that steps where the parameters are. The
large tables of the model, which turn characters into vectors and back, live on a parameter
worker; the LSTM between them lives on the trainer. One backward pass goes through both. Only
activations and their gradients cross the network, never the tables.

It corresponds to "Distributed RNN using Distributed Autograd and Distributed Optimizer", a part
of "Getting Started with Distributed RPC Framework" in PyTorch's tutorials. The text is the
chapter of Python's own manual that ``help("COMPOUND")`` would show, read character by character.

    zrpc launch --nprocs 2 examples/distributed_rnn.py
    zrpc launch --nprocs 2 examples/distributed_rnn.py --check

With ``--check`` the same model is trained again without zrpc, in one process and from the same
seeds. The losses must be the same, except for rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

import torch
from torch import nn
from torch.nn import functional

import zrpc as rpc
import zrpc.autograd as dist_autograd
from zrpc.optim import DistributedOptimizer, clip_grad_norm_

TEXT: str = topics["compound"]
ALPHABET = sorted(set(TEXT))
WIDTH = 48
SEQUENCES = 16  # parts of the text that are read in parallel
LENGTH = 24  # characters until the next step of the optimizer
LEARNING_RATE = 0.01
MAX_NORM = 1.0
STEPS_PER_LINE = 10

Layer = Callable[[torch.Tensor], torch.Tensor]
State = tuple[torch.Tensor, torch.Tensor] | None


def make_embedding(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Embedding(len(ALPHABET), WIDTH)


def make_decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed + 1)
    return nn.Linear(WIDTH, len(ALPHABET))


def make_lstm(seed: int) -> nn.LSTM:
    torch.manual_seed(seed + 2)
    return nn.LSTM(WIDTH, WIDTH)


def parameters_of(module: rpc.RRef[nn.Module]) -> list[rpc.RRef[nn.Parameter]]:
    """On the owner of a module: returns an RRef of each of its parameters."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def minibatches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields characters and their successors, both of shape (LENGTH, SEQUENCES)."""
    numbers = torch.tensor([ALPHABET.index(character) for character in TEXT])
    rows = len(numbers) // SEQUENCES
    columns = numbers[: rows * SEQUENCES].view(SEQUENCES, rows).T
    for step in range(steps):
        start = step * LENGTH % (rows - LENGTH - 1)
        yield columns[start : start + LENGTH], columns[start + 1 : start + 1 + LENGTH]


def forward(
    embed: Layer, lstm: nn.LSTM, decode: Layer, characters: torch.Tensor, state: State
) -> tuple[torch.Tensor, State]:
    """Runs the forward pass, wherever the parts of the model are."""
    output, (hidden, cell) = lstm(embed(characters), state)
    return decode(output), (hidden.detach(), cell.detach())


def loss_of(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def train(parameter_worker: str, steps: int, seed: int) -> list[float]:
    """On the trainer: returns the loss of each step."""
    lstm = make_lstm(seed)
    parameters = [rpc.RRef(parameter) for parameter in lstm.parameters()]
    tables = []
    for make in (make_embedding, make_decoder):
        table: rpc.RRef[nn.Module] = rpc.remote(parameter_worker, make, args=(seed,))
        # This also waits for the table: making two at once would interleave their use of one
        # random generator.
        parameters += rpc.rpc_sync(parameter_worker, parameters_of, args=(table,))
        tables.append(table)
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=LEARNING_RATE)
    losses = []
    state: State = None
    for step, (characters, following) in enumerate(minibatches(steps), 1):
        with dist_autograd.context() as context_id:
            embed, decode = (table.rpc_sync().forward for table in tables)
            scores, state = forward(embed, lstm, decode, characters, state)
            loss = loss_of(scores, following)
            dist_autograd.backward(context_id, [loss])
            clip_grad_norm_(context_id, parameters, MAX_NORM)
            optimizer.step(context_id)
        losses.append(loss.item())
        if step % STEPS_PER_LINE == 0:
            mean = sum(losses[-STEPS_PER_LINE:]) / STEPS_PER_LINE
            print(f"step {step:4d}   loss {mean:.3f}", flush=True)
    return losses


def train_in_one_process(steps: int, seed: int) -> list[float]:
    """Trains without zrpc; returns the loss of each step."""
    embedding, decoder, lstm = make_embedding(seed), make_decoder(seed), make_lstm(seed)
    parameters = [*lstm.parameters(), *embedding.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    losses = []
    state: State = None
    for characters, following in minibatches(steps):
        scores, state = forward(embedding, lstm, decoder, characters, state)
        loss = loss_of(scores, following)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(options: argparse.Namespace) -> str | None:
    """On the trainer: trains; returns what went wrong, if anything."""
    losses = train("parameters", options.steps, options.seed)
    if options.check:
        expected = train_in_one_process(options.steps, options.seed)
        largest = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(f"largest difference of a loss to one process: {largest:.1e}", flush=True)
        if largest > 1e-3:
            return "The losses differ by more than rounding."
    return None


def main() -> None:
    """Runs this worker: the trainer if its rank is 0, otherwise the parameter worker."""
    parser = argparse.ArgumentParser(description="Train an RNN with tables on another worker.")
    parser.add_argument("--steps", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size != 2:
        parser.error(f"expected 2 workers, but got {world_size}: use zrpc launch -n 2")
    torch.set_num_threads(1)
    rpc.init_rpc(["trainer", "parameters"][rank])
    failure = run(options) if rank == 0 else None
    rpc.shutdown()  # the parameter worker answers calls here until the trainer is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
