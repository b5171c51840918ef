"""Workers in containers of one pod: they share a directory, and see no processes of each other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import SCRIPT_DEADLINE, Programs

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

WORKER = """
    import json, os
    import torch, zrpc

    rank = int(os.environ["RANK"])
    zrpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    sent = torch.ones(1 << 18)
    for _ in range(3 * (1 - rank)):
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (sent,)), -sent)
    traffic = zrpc.stats().traffic["shared_memory"]
    zrpc.shutdown()
    found = [link for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")
             and "memfd:zrpc" in (link := os.readlink(f"/proc/self/fd/{fd}"))]
    print(json.dumps([os.getpid(), traffic.bytes_sent, traffic.bytes_received, found]))
"""


@pytest.mark.system
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_containers_that_share_a_directory_use_shared_memory(
    tmp_path: Path, free_port: int
) -> None:
    made = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs a namespace of processes: {made.stderr}")
    programs = Programs(tmp_path, free_port)
    script = programs.write(WORKER)
    workers = [
        subprocess.Popen(
            [*CONTAINER, sys.executable, script],
            env=programs.env(rank, 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=SCRIPT_DEADLINE)[0] for worker in workers]
        assert programs.left() == []
    finally:
        for worker in workers:
            worker.kill()
        programs.close()
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    nbytes = 3 * 4 << 18
    # In its own eyes each is the first process. The results come the same way.
    assert results[0] == [1, nbytes, nbytes, []], outputs
    assert results[1][0] == 1, outputs
