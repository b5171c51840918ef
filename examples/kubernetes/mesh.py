"""The work of examples/kubernetes/mesh.yaml: each worker calls its neighbour.

Kubernetes sends SIGTERM when a pod must go, for example if its node is drained. A container's first
process ignores it unless the program handles it.
"""

from __future__ import annotations

import signal
import sys

import zrpc as rpc


def main() -> None:
    # Leaves the mesh, as SystemExit ends the block below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    # Pods start when their images have been pulled: wait ten minutes for the last one.
    options = rpc.ZmqRpcBackendOptions(init_timeout=600)
    with rpc.session(rpc_backend_options=options) as worker:
        neighbour = (worker.id + 1) % rpc.world_size()
        print(worker.name, "of", rpc.world_size(), rpc.rpc_sync(neighbour, pow, (worker.id, 2)))


if __name__ == "__main__":
    main()
