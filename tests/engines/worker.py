"""A worker that takes its place from its engine: calls its neighbour and prints one line."""

import sys

import zrpc as rpc

with rpc.session() as worker:
    neighbour = (worker.id + 1) % rpc.world_size()
    squared = rpc.rpc_sync(neighbour, pow, (worker.id, 2))
    # In one piece: `print` may write the end of a line apart, and engines mix what workers write.
    sys.stdout.write(f"{worker.name} of {rpc.world_size()} {squared}\n")
