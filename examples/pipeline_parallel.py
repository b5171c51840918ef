"""A residual network in three stages on three workers, and the gain from micro-batches.

What it shows: RRefs to results that are still being computed, as arguments of further calls. So
the output of a stage goes directly to the worker with the next stage. A batch in one piece leaves
two of three workers idle at any time. In several pieces, the first stage can work on the second
piece while the second stage works on the first. The backward pass takes the same route in reverse.

The example trains the same network with the same data in 1, 2, 4 and 8 pieces, and prints the time
of the fastest step. The gain depends on the processors: on one, nothing can overlap; on two, at
most half of the time can be saved. Four pieces saved 9 to 37% in runs on two processors that had
other work too. More pieces are smaller, and each needs its own calls. The losses must be the same
in all runs. So the blocks normalize groups of channels: batch normalization would depend on how a
batch is cut.

It corresponds to "Distributed Pipeline Parallelism Using RPC" in PyTorch's tutorials, with blocks
that are written out here. The task is to tell apart noisy stripes of four directions.

    zrpc launch --nprocs 4 examples/pipeline_parallel.py

With ``--device cuda`` each stage is on a GPU. Device maps say where what it receives arrives.
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
import zrpc.autograd as dist_autograd
from zrpc.optim import DistributedOptimizer

PIECES = (1, 2, 4, 8)
SIZE = 16  # of an image, in pixels
DIRECTIONS = 4
LEARNING_RATE = 0.005


class Block(nn.Module):
    """Two convolutions, and a path around them."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.around = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.around(images) + self.residual(images))


def make_layers(stage: int) -> nn.Sequential:
    """Returns the layers of a stage; all stages take about the same time."""
    if stage == 0:
        return nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), Block(32, 32))
    if stage == 1:
        return nn.Sequential(Block(32, 64, stride=2), Block(64, 64))
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, DIRECTIONS))
    return nn.Sequential(Block(64, 128, stride=2), Block(128, 128), *pool)


class Stage:
    """One stage of the network, on its own worker."""

    def __init__(self, stage: int, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed + stage)
        self.layers = make_layers(stage).to(device)
        # Computing the pieces one after the other is faster than all at once.
        self.lock = threading.Lock()

    def forward(self, images: rpc.RRef[torch.Tensor]) -> torch.Tensor:
        """Fetches a piece from the worker that has it, and computes the stage's output."""
        values = images.to_here()
        with self.lock:
            output: torch.Tensor = self.layers(values)
        return output

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


class Pipeline:
    """The whole network, as the master sees it."""

    def __init__(self, workers: list[str], options: argparse.Namespace) -> None:
        self.stages = [
            rpc.remote(name, Stage, (i, options.seed, device_of(i + 1, options.device)))
            for i, name in enumerate(workers)
        ]

    def forward(self, images: torch.Tensor, pieces: int) -> torch.Tensor:
        first, second, last = self.stages
        scores = []
        for piece in images.chunk(pieces):
            output = second.remote().forward(first.remote().forward(rpc.RRef(piece)))
            scores.append(last.rpc_async().forward(output))
        return torch.cat([future.wait() for future in scores])


def make_batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images, and the direction of the stripes in each."""
    labels = torch.randint(DIRECTIONS, (size,), generator=generator)
    angles = (labels * torch.pi / DIRECTIONS).view(-1, 1, 1, 1)
    rows = torch.arange(SIZE).view(-1, 1)
    columns = torch.arange(SIZE)
    shifts = 6 * torch.rand(size, 1, 1, 1, generator=generator)
    stripes = (angles.cos() * rows + angles.sin() * columns + shifts).sin()
    return stripes + 0.5 * torch.randn(size, 1, SIZE, SIZE, generator=generator), labels


def train(
    workers: list[str], pieces: int, steps: int, options: argparse.Namespace
) -> tuple[list[float], float]:
    """On the master: returns the losses, and the time of the fastest step in seconds."""
    pipeline = Pipeline(workers, options)
    parameters = [rref for stage in pipeline.stages for rref in stage.rpc_sync().parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(options.seed)
    losses, seconds = [], []
    for _ in range(steps):
        images, labels = make_batch(options.batch, generator)
        began = time.monotonic()
        with dist_autograd.context() as context_id:
            loss = functional.cross_entropy(pipeline.forward(images, pieces), labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        seconds.append(time.monotonic() - began)
        losses.append(loss.item())
    return losses, min(seconds)


def run(workers: list[str], options: argparse.Namespace) -> str | None:
    """On the master: compares the runs; returns what is wrong with the result, if anything."""
    print(f"{len(os.sched_getaffinity(0))} processors, batches of {options.batch} images")
    whole, whole_seconds = train(workers, 1, 3, options)  # to warm up
    for pieces in PIECES:
        losses, seconds = train(workers, pieces, options.steps, options)
        if pieces == 1:
            whole, whole_seconds = losses, seconds
        saved = 1 - seconds / whole_seconds
        print(
            f"{pieces} piece{'s' if pieces > 1 else ' '} {1000 * seconds:6.1f} ms per step"
            f"  {saved:4.0%} saved   loss {losses[0]:.4f} -> {losses[-1]:.4f}",
            flush=True,
        )
        if max(abs(a - b) for a, b in zip(losses, whole, strict=True)) > 1e-3:
            return "The losses differ by more than rounding."
    return None


def device_of(rank: int, wanted: str) -> torch.device:
    """Returns the device of a worker; on one host its rank is its ``LOCAL_RANK``."""
    device = torch.device(wanted if rank else "cpu")  # the master computes on the CPU
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, (rank - 1) % torch.get_device_module(device).device_count())


def device_maps(names: list[str], wanted: str) -> rpc.ZmqRpcBackendOptions:
    """Returns options that let what a worker sends and fetches arrive on the other's device."""
    options = rpc.ZmqRpcBackendOptions()
    own = device_of(int(os.environ["LOCAL_RANK"]), wanted)
    for rank, name in enumerate(names):
        options.set_device_map(name, {own: device_of(rank, wanted)})
    return options


def main() -> None:
    """Runs this worker: the master if its rank is 0, otherwise a stage."""
    parser = argparse.ArgumentParser(description="Train a network in three stages.")
    parser.add_argument("--steps", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=256, help="images; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="of the stages; default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size != 4:
        parser.error(f"expected 4 workers, but got {world_size}: use zrpc launch -n 4")
    torch.set_num_threads(1)  # only the stages may run in parallel
    names = ["master", "stage0", "stage1", "stage2"]
    rpc.init_rpc(names[rank], rpc_backend_options=device_maps(names, options.device))
    failure = run(names[1:], options) if rank == 0 else None
    rpc.shutdown()  # stages answer calls here until the master is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
