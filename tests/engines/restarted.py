"""A worker that calls all others; in the first round, the last rank then dies in a call.

Prints the process ids of the workers that have answered.
"""

import os
import sys
import time
from pathlib import Path

import torch

import zrpc as rpc


def main() -> None:
    with rpc.session() as worker:
        size = rpc.world_size()
        pids = [rpc.rpc_sync(rank, os.getpid) for rank in range(size)]
        assert pids[worker.id] == os.getpid()
        kept = rpc.remote((worker.id + 1) % size, torch.ones, args=(100_000,))
        assert int(kept.to_here().sum()) == 100_000
        # In one piece: under torchrun, `print` writes each of its arguments apart.
        sys.stdout.write(f"{worker.name} of {size} {' '.join(map(str, pids))}\n")
        sys.stdout.flush()
        rpc.barrier()
        failed = Path("failed")
        if "fail" in sys.argv and not failed.exists():
            rpc.barrier()  # all have seen that none has failed
            if worker.id == size - 1:
                failed.touch()
                os._exit(7)
            rpc.rpc_sync(size - 1, time.sleep, args=(600,), timeout=0)  # raises WorkerDied


if __name__ == "__main__":
    main()
