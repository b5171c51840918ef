"""Workers of which one comes later than calls may take: ZRPC_INIT_TIMEOUT alone is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import engine_environment, run
from tests.support.warm import warm_commands

pytestmark = pytest.mark.system
# The last of two workers comes three times as late as a call may take.
WORKER = """
import os, threading, time
import zrpc as rpc

rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(1.5)
rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.ZmqRpcBackendOptions(rpc_timeout=0.5))
joined = threading.Event()  # workers of an elastic mesh don't wait for one another
rpc.on_worker_joined(lambda worker: joined.set())
assert joined.wait(100)
other = rpc.rpc_sync(f"worker{1 - rank}", os.getenv, args=("RANK",), timeout=30)
print(f"rank {other}")  # in one piece: torchrun has Python write each piece at once
rpc.barrier(["worker0", "worker1"], timeout=30)  # nor would they before they leave
rpc.shutdown()
"""
ENGINES = {
    "launch": "-m zrpc.cli launch -n 2",
    "launch, restarts": "-m zrpc.cli launch -n 2 --max-restarts 1",
    "launch, elastic": "-m zrpc.cli launch -n 2 --elastic",
    "torchrun, static": "-m torch.distributed.run --nproc-per-node 2 --master-port {port}",
    "torchrun, c10d": (
        "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-id test "
        "--rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1"
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_one_variable_lets_a_worker_be_late(engine: str, free_port: int, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    arguments = ENGINES[engine].format(port=free_port).split()
    env = engine_environment(OMP_NUM_THREADS="1", ZRPC_INIT_TIMEOUT="100")
    command = [warm_commands().python, *arguments, str(tmp_path / "worker.py")]
    output = "\n".join(run(*command, env=warm_commands().environment(env)))
    assert output.count("rank 0") == output.count("rank 1") == 1
