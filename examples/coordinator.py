"""A coordinator that directs a flow of data which never passes through it.

What it shows: RRefs as arguments. Worker 0 tells four others what to compute from which values
by passing references. Each worker fetches the values directly from the worker that holds them.
Here they fit a line to a million numbers::

    worker 1: makes x and y ---> worker 2: the matrix x'x ---> worker 4: solves for the weights
                            \\--> worker 3: the vector x'y ---/

Tensors travel in a `Block`, which counts its bytes when it is unpickled. So the table at the end
is a measurement: worker 0 has received nothing.

It corresponds to the coordinator in PyTorch's talks on distributed RPC, and to the page "Remote
Reference Protocol" of its documentation.

    zrpc launch --nprocs 5 examples/coordinator.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

import zrpc as rpc

WEIGHTS = torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0])
NOISE = 0.1


class Block:
    """A tensor whose bytes are counted by each process that receives it."""

    received_bytes = 0  # in this process

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __reduce__(self) -> tuple[object, tuple[torch.Tensor]]:
        return Block._arrive, (self.values,)

    @classmethod
    def _arrive(cls, values: torch.Tensor) -> Block:
        cls.received_bytes += values.nbytes
        return cls(values)


def received_bytes() -> int:
    """Returns the number of bytes of tensors that this worker has received."""
    return Block.received_bytes


def make_points(count: int, seed: int) -> Block:
    """On worker 1: returns the points to fit, one per row, x before y."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, len(WEIGHTS), generator=generator)
    noise = NOISE * torch.randn(count, generator=generator)
    return Block(torch.column_stack([x, x @ WEIGHTS + noise]))


def matrix(points: rpc.RRef[Block]) -> Block:
    """On worker 2: returns x'x. `to_here` fetches the points from worker 1."""
    x = points.to_here().values[:, :-1]
    return Block(x.T @ x)


def vector(points: rpc.RRef[Block]) -> Block:
    """On worker 3: returns x'y."""
    values = points.to_here().values
    return Block(values[:, :-1].T @ values[:, -1])


class Fit:
    """On worker 4: computes the weights from the results of workers 2 and 3."""

    def __init__(self, matrix: rpc.RRef[Block], vector: rpc.RRef[Block]) -> None:
        self.weights = torch.linalg.solve(matrix.to_here().values, vector.to_here().values)

    def error(self) -> float:
        """Returns the largest difference of a weight from the true one."""
        return float((self.weights - WEIGHTS).abs().max())


def coordinate(count: int, seed: int) -> float:
    """On worker 0: sets up the flow, and returns the error of the fit."""
    began = time.monotonic()
    points = rpc.remote("worker1", make_points, args=(count, seed))
    parts = (
        rpc.remote("worker2", matrix, args=(points,)),
        rpc.remote("worker3", vector, args=(points,)),
    )
    fit = rpc.remote("worker4", Fit, args=parts)
    # None of these calls has waited; the workers wait for one another.
    print(f"set up in {1000 * (time.monotonic() - began):.1f} ms", flush=True)
    error: float = fit.rpc_sync().error()
    print(f"fitted in {1000 * (time.monotonic() - began):.1f} ms", flush=True)
    for name in (f"worker{rank}" for rank in range(5)):
        print(f"{name} received {rpc.rpc_sync(name, received_bytes):>12,d} bytes of tensors")
    return error


def main() -> None:
    """Runs this worker; workers other than 0 only answer calls."""
    parser = argparse.ArgumentParser(description="Direct a data flow among four workers.")
    parser.add_argument("--points", type=int, default=200_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 5:
        parser.error(f"expected at least 5 workers, but got {world_size}: use zrpc launch -n 5")
    rpc.init_rpc(f"worker{rank}")
    failure = None
    if rank == 0:
        error = coordinate(options.points, options.seed)
        print(f"largest error of the {len(WEIGHTS)} weights: {error:.5f}", flush=True)
        # A few standard deviations of a weight's error.
        if error > 6 * NOISE / options.points**0.5:
            failure = "The weights are further off than the noise explains."
    rpc.shutdown()  # workers 1 to 4 answer calls here until worker 0 is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
