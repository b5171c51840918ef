"""The environment variables that workers get, in a launcher process of their own."""

from __future__ import annotations

import json
import os
import re
from unittest import mock

import pytest

from tests.launch.conftest import Start
from zrpc.launch.worker import base_environment

SHOW = """
    import json, os, sys
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
            "ZRPC_WORKER_NAME", "ZRPC_RUNTIME_DIR", "OMP_NUM_THREADS", "EXTRA",
            "TORCHELASTIC_USE_AGENT_STORE", "ZRPC_STORE_DIR")
    print(json.dumps([{key: os.environ.get(key) for key in keys}, sys.argv[1:]]))
    """


def shown(out: str) -> list[tuple[int, dict[str, str], list[str]]]:
    rows = []
    for line in out.splitlines():
        prefix, _, rest = line.partition(" ")
        rows.append((int(prefix[1:-1]), *json.loads(rest)))
    return sorted(rows, key=lambda row: row[0])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_worker_gets_its_environment(start: Start, method: str) -> None:
    environ = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1"}
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    launched = start(
        SHOW,
        argv=["--nprocs", "9"],
        nprocs=3,
        name_prefix="w",
        env={"EXTRA": "a=b"},
        start_method=method,
        environ=environ,
    )
    code, out, err = launched.finish()
    assert (code, err) == (0, "")
    rows = shown(out)
    assert [row[0] for row in rows] == [0, 1, 2]
    for rank, env, argv in rows:
        assert argv == ["--nprocs", "9"]
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "3"
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert 1024 < int(env["MASTER_PORT"]) < 65536
        assert env["ZRPC_WORKER_NAME"] == f"w{rank}"
        assert env["OMP_NUM_THREADS"] == "1"
        assert env["EXTRA"] == "a=b"
        assert env["TORCHELASTIC_USE_AGENT_STORE"] is None
    assert len({row[1]["MASTER_PORT"] for row in rows}) == 1
    (directory,) = {row[1]["ZRPC_RUNTIME_DIR"] for row in rows}
    assert {row[1]["ZRPC_STORE_DIR"] for row in rows} == {directory}
    assert not os.path.exists(directory)


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
