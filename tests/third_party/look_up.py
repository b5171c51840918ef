"""Looks features up in the stores of two torch_geometric workers, each of which has half."""

from __future__ import annotations

import os
import sys

import torch
from torch_geometric.distributed import LocalFeatureStore
from torch_geometric.distributed.dist_context import DistContext
from torch_geometric.distributed.rpc import (
    RPCRouter,
    global_all_gather,
    global_barrier,
    init_rpc,
    rpc_is_initialized,
    rpc_partition_to_workers,
    shutdown_rpc,
)

NODES = 10


def run(rank: int, port: str) -> None:
    context = DistContext(rank, rank, 2, 2, "loader")
    init_rpc(context, "127.0.0.1", int(port), rpc_timeout=60)
    mine = torch.arange(NODES)[torch.arange(NODES) % 2 == rank]
    store = LocalFeatureStore.from_data(mine, x=torch.stack([mine, mine * 10], dim=1).float())
    store.num_partitions, store.partition_idx = 2, rank
    store.node_feat_pb = torch.arange(NODES) % 2
    store.meta = {"is_hetero": False}
    workers = rpc_partition_to_workers(context, 2, rank)
    store.set_rpc_router(RPCRouter(workers))
    global_barrier()
    found = store.lookup_features(torch.tensor([7, 2, 2, 9, 0])).wait()
    seen = global_all_gather(found.sum().item())
    if rank == 0:
        print(workers, found.tolist(), dict(sorted(seen.items())), rpc_is_initialized())
    shutdown_rpc()
    print("used", torch.distributed.rpc.rpc_sync.__module__, file=sys.stderr)


if __name__ == "__main__":
    run(int(os.environ["RANK"]), sys.argv[1])
