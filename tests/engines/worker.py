"""A worker that takes its place from its engine: calls its neighbour and prints one line."""

import zrpc as rpc

with rpc.session() as worker:
    neighbour = (worker.id + 1) % rpc.world_size()
    print(worker.name, "of", rpc.world_size(), rpc.rpc_sync(neighbour, pow, (worker.id, 2)))
