"""The environment variables that workers get, in a launcher process of their own."""

from __future__ import annotations

import json
import os
import re
from unittest import mock

import pytest

from tests.launch.conftest import Start
from zrpc.launch.worker import base_environment

SHARED = ("MASTER_PORT", "ZRPC_RUNTIME_DIR", "ZRPC_STORE_DIR")
SHOW = f"""
    import json, os, sys
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
            "OMP_NUM_THREADS", "ZRPC_WORKER_NAME", "EXTRA", "TORCHELASTIC_USE_AGENT_STORE")
    keys += {SHARED}
    print(json.dumps({{"argv": sys.argv[1:], **{{key: os.environ.get(key) for key in keys}}}}))
    """
OUTER = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_worker_gets_its_environment(start: Start, method: str) -> None:
    job = {"argv": ["--nprocs", "9"], "name_prefix": "w", "env": {"EXTRA": "a=b"}}
    code, out, err = start(SHOW, nprocs=3, start_method=method, environ=OUTER, **job).finish()
    assert (code, err) == (0, "")
    lines = enumerate(sorted(out.splitlines()))
    rows = [json.loads(line.removeprefix(f"[{rank}] ")) for rank, line in lines]
    [(port, directory, store)] = {tuple(row.pop(key) for key in SHARED) for row in rows}
    assert 1024 < int(port) < 65536
    assert store == directory
    assert not os.path.exists(directory)
    same = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "EXTRA": "a=b"}
    same |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": None, "argv": job["argv"]}
    for rank, row in zip("012", rows, strict=True):
        own = {"RANK": rank, "LOCAL_RANK": rank, "ZRPC_WORKER_NAME": f"w{rank}"}
        assert row == {**same, **own}


MEET = """
    import os, pathlib, stat, torch, zrpc
    import torch.distributed as dist

    zrpc.init_rpc()
    zrpc.barrier()
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listens = any(row[1].endswith(port) and row[3] == "0A" for row in rows)
    mode = stat.S_IMODE(os.stat(os.environ["ZRPC_STORE_DIR"]).st_mode)
    zrpc.barrier()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(listens, oct(mode), total.item())
    zrpc.shutdown()
    dist.destroy_process_group()
    """


def test_workers_meet_out_of_reach_of_other_users(start: Start) -> None:
    """No port is opened for that. A process group of the program meets at the master's."""
    code, out, err = start(MEET, nprocs=2, preload=["torch", "zrpc.api"]).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] False 0o700 2.0", "[1] False 0o700 2.0"]


# Looks for the secret on all command lines, also the launcher's and the fork server's.
SECRET = """
    import contextlib, os, pathlib
    secret, shown = os.environ.get("ZRPC_SECRET", ""), False
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # of a process that has ended
            shown |= bool(secret) and secret.encode() in path.read_bytes()
    print(secret, os.environ.get("ZRPC_SECRET_FILE", ""), shown, sep=",")
    """


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="needs /proc")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_a_secret_that_is_on_no_command_line(start: Start, method: str) -> None:
    runs = [start(SECRET, nprocs=2, start_method=method) for _ in range(2)]
    secrets = []
    for run in runs:
        (shown,) = {line.partition(" ")[2] for line in run.finish()[1].splitlines()}
        assert re.fullmatch(r"\w{64},,False", shown)
        secrets.append(shown)
    assert secrets[0] != secrets[1]


def test_what_is_given_is_kept_and_the_threads_of_one_worker_are_not_limited() -> None:
    for nprocs, environ, extra in (
        (1, {"ZRPC_SECRET": "given" * 9}, {}),
        (1, {"ZRPC_SECRET_FILE": "/a/file"}, {}),
        (1, {}, {"ZRPC_SECRET_FILE": "/a/file"}),
        (2, {"OMP_NUM_THREADS": "3", "ZRPC_SECRET_FILE": "/a/file"}, {}),
    ):
        with mock.patch.dict(os.environ, environ, clear=True):
            assert base_environment(nprocs, extra) == {**environ, **extra}
