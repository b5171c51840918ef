"""init_rpc in programs: again, after a failure, and beside a gloo group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import Programs

Succeed = Callable[..., list[str]]


HEAD = """
import os, sys
import torch
import zrpc as rpc

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
other = f"w{1 - rank}"

def again(options=None):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    assert rpc.rpc_sync(other, torch.add, (torch.ones(1), rank)).item() == 1 + rank
    assert rpc.rpc_sync(other, rpc.get_worker_info).name == other
    rpc.shutdown()

"""


@pytest.mark.parametrize("init_method", [None, "tcp", "file"])
def test_three_meshes_one_after_another(
    succeed: Succeed, programs: Programs, tmp_path: Path, init_method: str | None
) -> None:
    methods = {"tcp": f"tcp://127.0.0.1:{programs.port}", "file": f"file://{tmp_path}/store"}
    url = methods.get(str(init_method), init_method)
    made = f"rpc.ZmqRpcBackendOptions(init_method={url!r}, init_timeout=20)" if url else "None"
    succeed(HEAD + f"for _ in range(3): again({made})\n")


def test_a_retry_after_a_failure_finds_the_others(succeed: Succeed) -> None:
    """Rank 1 comes when rank 0 has failed once already."""
    succeed(
        HEAD
        + """
from pathlib import Path
short = rpc.ZmqRpcBackendOptions(init_timeout=0.5)
if rank == 0:
    try:
        again(short)
    except rpc.RendezvousError as error:
        assert "rank 1 is missing" in str(error)
        Path("failed").touch()
    else:
        sys.exit("nobody was missing")
else:
    import time
    while not Path("failed").exists():
        time.sleep(0.01)
again(rpc.ZmqRpcBackendOptions(init_timeout=20))
"""
    )


@pytest.mark.parametrize("shared_file", [False, True])
def test_beside_a_gloo_group(succeed: Succeed, tmp_path: Path, shared_file: bool) -> None:
    """Of the same variables, or of the same file."""
    url = f"file://{tmp_path}/shared" if shared_file else "env://"
    succeed(
        HEAD
        + f"""
import torch.distributed as dist
url = "{url}"
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=world_size,
             rpc_backend_options=rpc.ZmqRpcBackendOptions(init_method=url, init_timeout=20))
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == 2
assert rpc.rpc_sync(other, max, (1, 2)) == 2
rpc.shutdown()
dist.all_reduce(value)
dist.destroy_process_group()
"""
    )
