"""Work of four workers that can be stopped at any time and goes on where it was: see job.sh.

Rank 0 does the steps, for which the others compute. On SIGTERM it saves its state and leaves; the
others serve until it has left. The state is saved now and then, too, for the case of a failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

import torch

import zrpc as rpc

stopped = threading.Event()


def gradient(weights: torch.Tensor, seed: int) -> torch.Tensor:
    """Runs on the workers."""
    target = torch.full_like(weights, 2.0) + 0.1 * torch.randn(
        weights.shape, generator=torch.Generator().manual_seed(seed)
    )
    return weights - target


def save(path: Path, step: int, weights: torch.Tensor) -> None:
    """Replaces the file at once: a worker that is killed meanwhile leaves the old one."""
    new = path.with_suffix(".new")
    torch.save({"step": step, "weights": weights}, new)
    os.replace(new, path)


def train(path: Path, steps: int) -> None:
    step, weights = 0, torch.zeros(16)
    if path.exists():
        saved = torch.load(path)
        step, weights = saved["step"], saved["weights"]
    print("starts at step", step, flush=True)
    others = range(1, rpc.world_size())
    while step < steps and not stopped.is_set():
        futures = [rpc.rpc_async(each, gradient, args=(weights, step)) for each in others]
        weights = weights - 0.1 * sum(future.wait() for future in futures) / len(others)
        step += 1
        if step % 100 == 0:
            save(path, step, weights)
    save(path, step, weights)
    print("stopped at step" if stopped.is_set() else "finished with step", step, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    # Slurm may start the tasks of some nodes later, for example after their prolog.
    options = rpc.ZmqRpcBackendOptions(init_timeout=600)
    with rpc.session(rpc_backend_options=options) as worker:
        if worker.id == 0:
            train(args.checkpoint, args.steps)
    # The signal may reach this node only now. This worker has succeeded nevertheless.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    main()
