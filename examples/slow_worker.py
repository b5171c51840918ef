"""Finding the slow worker: what `zrpc.stats` and `zrpc.trace` show of a program that is slow.

What it shows: a coordinator has trainers do one step at a time and waits for all of them, so each
step takes as long as the slowest trainer. All trainers read rows of a table on another worker. One
of them reads them in a way that looks harmless: one call for each row.

The coordinator asks all workers for their numbers. They show which trainer is slow, and why: it
makes many more calls. A trace shows the same as a picture, at https://ui.perfetto.dev.

    zrpc launch --nprocs 5 examples/slow_worker.py --trace trace.json
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch

import zrpc as rpc

ROWS = 4096
WIDTH = 64
BATCH = 64
TABLE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def read_rows(indices: torch.Tensor) -> torch.Tensor:
    """Returns rows of the table; called on the worker that has it."""
    return TABLE[indices]


def load_at_once(indices: torch.Tensor) -> torch.Tensor:
    """Loads a batch by one call."""
    return rpc.rpc_sync("table", read_rows, args=(indices,))


def load_row_by_row(indices: torch.Tensor) -> torch.Tensor:
    """Loads the same batch by one call for each row."""
    rows = [rpc.rpc_sync("table", read_rows, args=(index,)) for index in indices]
    return torch.stack(rows)


def step(number: int, slowly: bool) -> float:
    """Trains on one batch; called on a trainer."""
    indices = torch.randint(ROWS, (BATCH,), generator=torch.Generator().manual_seed(number))
    with rpc.span("load a batch"):
        batch = (load_row_by_row if slowly else load_at_once)(indices)
    with rpc.span("compute"):
        weights = torch.ones(WIDTH, requires_grad=True)
        loss = (batch @ weights).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def train(trainers: list[str], steps: int, slow: str) -> None:
    """Does some steps with all trainers; called on the coordinator."""
    for number in range(steps):
        with rpc.span(f"step {number}"):
            rpc.wait_all(
                [rpc.rpc_async(name, step, args=(number, name == slow)) for name in trainers]
            )


def report(trainers: list[str]) -> str:
    """Prints what each trainer has done, and returns the slowest one."""
    seconds = {}
    for name in trainers:
        stats = rpc.rpc_sync(name, rpc.stats)
        steps, reads = stats.handlers["step"], stats.calls["read_rows"]
        seconds[name] = steps.run_seconds / steps.number
        print(
            f"{name}: {steps.number} steps of {seconds[name] * 1e3:.1f} ms, and {reads.number} "
            f"calls of read_rows, half of them within {reads.quantile(0.5) * 1e3:.2f} ms"
        )
    slowest = max(seconds, key=lambda name: seconds[name])
    print(f"the slowest is {slowest}", flush=True)
    return slowest


def main() -> None:
    """Runs this worker: the coordinator, the table or a trainer, by its rank."""
    parser = argparse.ArgumentParser(description="Find out which worker is slow, and why.")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--trace", help="write a trace of the steps to this file")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 4:
        parser.error("expected a coordinator, the table and at least two trainers: use zrpc launch")
    names = ["coordinator", "table", *(f"trainer{index}" for index in range(2, world_size))]
    with rpc.session(names[rank]):
        if rank == 0:
            trainers = names[2:]
            with rpc.trace(options.trace) if options.trace else contextlib.nullcontext():
                train(trainers, options.steps, slow=trainers[1])
            report(trainers)


if __name__ == "__main__":
    main()
