"""Workers that are started again, and workers that join and leave, as a user launches them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Start
from zrpc.launch import Task
from zrpc.launch.signals import FORWARDED, STOPS, SignalInbox
from zrpc.launch.starter import DEFAULT_PRELOAD
from zrpc.launch.store import StoreAddress, parse_address, reserve_ranks

PRELOAD = list(DEFAULT_PRELOAD)

FAILS = """
    import json, os, sys, time
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "ZRPC_MAX_RESTARTS")
    print(json.dumps({key: os.environ.get(key) for key in keys}))
    if os.environ["RANK"] == "1":
        sys.exit("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"])
    time.sleep(1000)
    """


def test_a_worker_is_restarted_until_its_restarts_are_used_up(start: Start, tmp_path: Path) -> None:
    outer = {"TORCHELASTIC_RESTART_COUNT": "9", "ZRPC_MAX_RESTARTS": "9"}
    job = {"max_restarts": 2, "log_dir": str(tmp_path / "logs"), "preload": PRELOAD}
    code, out, err = start(FAILS, nprocs=2, environ=outer, **job).finish()
    assert code == 1
    rows = [json.loads(line[4:]) for line in out.splitlines()]
    assert sorted(row.pop("TORCHELASTIC_RESTART_COUNT") for row in rows) == ["0", "0", "1", "2"]
    assert len({row["MASTER_PORT"] for row in rows}) == 1
    for row in rows:
        assert (row["WORLD_SIZE"], row["LOCAL_RANK"]) == ("2", row["RANK"])
        assert row["TORCHELASTIC_MAX_RESTARTS"] == row["ZRPC_MAX_RESTARTS"] == "2"
        assert row["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    for count in (1, 2):
        assert f"rank 1 failed (exit code 1); starting it again (restart {count} of 2)" in err
    assert "zrpc launch: rank 1 failed (exit code 1); stopping 1 worker" in err
    assert err.endswith("its standard error ends with:\nattempt 2\n")  # of the last attempt alone
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").glob("*.err")}
    attempts = {f"rank1{n}.err": f"attempt {i}\n" for i, n in enumerate(("", ".1", ".2"))}
    assert logs == {"rank0.err": "", **attempts}


RESTARTED = """
    import os, signal, threading
    import zrpc

    zrpc.init_rpc()
    back = threading.Event()
    zrpc.on_worker_joined(lambda worker: worker.incarnation and back.set())
    if zrpc.get_worker_info().rank == 1:
        pid = zrpc.rpc_sync("worker0", os.getpid)
        try:
            zrpc.rpc_sync("worker0", os.kill, (pid, signal.SIGKILL))
        except zrpc.WorkerDied as error:
            print("died:", str(error)[:31])
        assert back.wait(30)
        print("back", zrpc.rpc_sync("worker0", zrpc.get_worker_info).incarnation)
    zrpc.shutdown()
    """


def test_the_others_call_rank_0_after_it_was_killed_and_started_again(start: Start) -> None:
    """It would otherwise host the store."""
    code, out, err = start(RESTARTED, nprocs=2, max_restarts=1, preload=PRELOAD).finish()
    assert out == "[1] died: worker worker0 (rank 0) is gone\n[1] back 1\n", err
    assert code == 0
    assert "rank 0 failed (SIGKILL" in err


def test_one_that_is_restarted_when_the_others_have_finished_does_not_wait(start: Start) -> None:
    """It has left the mesh itself, so the others might have come for another one."""
    script = """
        import os, select, zrpc
        zrpc.init_rpc()
        first = zrpc.rpc_sync("worker0", os.getpid)
        ended = os.pidfd_open(first)
        zrpc.shutdown()
        if first != os.getpid():
            select.select([ended], [], [])
            raise SystemExit(3)
        """
    code, _, err = start(script, nprocs=2, max_restarts=1, preload=PRELOAD).finish()
    assert code == 1
    assert "rank 1 failed (exit code 3); starting it again" in err
    assert "expected 2 workers, but rank 0 has ended with exit code 0" in err


ELASTIC = """
    import os, sys, threading
    import zrpc as rpc

    stop = threading.Event()
    rank = int(os.environ["RANK"])
    assert not {"WORLD_SIZE", "ZRPC_RUNTIME_DIR", "ZRPC_STORE_DIR"} & os.environ.keys()
    assert os.environ["LOCAL_RANK"] == str(rank % 2)
    rpc.init_rpc(f"worker{rank}")
    print("in", rpc.get_worker_info())
    if rank == 0:
        rpc.shutdown()
        print("out")
    elif rank == 1:
        assert stop.wait(100)
        rpc.shutdown()
    else:
        print(rpc.rpc_sync("worker1", max, (1, 2)))
        rpc.rpc_sync("worker1", lambda: sys.modules["__main__"].stop.set())
        rpc.shutdown()
    """


def test_an_elastic_launch_says_what_is_needed_to_join_it(start: Start) -> None:
    code, _, err = start("pass", elastic=True).finish()
    assert code == 0
    assert "to join it, set ZRPC_SECRET_FILE for both launches" in err


def test_a_second_launch_adds_workers_to_an_elastic_mesh(start: Start, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5ec7e7" * 12)
    secret.chmod(0o600)
    job = {"elastic": True, "preload": PRELOAD, "environ": {"ZRPC_SECRET_FILE": str(secret)}}
    first = start(ELASTIC, nprocs=2, **job)
    first.read_until("[0] out\n")
    place = re.search(rb"can be joined at (\S+)\n", first.process.stderr.readline())
    assert place is not None
    second = start(ELASTIC, join=place[1].decode(), **job)
    code, out, err = second.finish()
    assert code == 0, err
    assert out == "[2] in WorkerInfo(id=2, name=worker2)\n[2] 2\n"
    code, out, err = first.finish()
    assert code == 0, err
    assert "[1] in WorkerInfo(id=1, name=worker1)\n" in out


@pytest.mark.parametrize(
    ("way", "texts"),
    [
        ("listen", ["could not host a store for the workers at", "in use"]),
        ("join", ["could not find the workers' store at", "--join names", "within 0.5 s"]),
    ],
)
def test_a_store_that_cannot_be_hosted_or_found_is_an_error(
    start: Start, free_port: int, way: str, texts: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if way == "listen" else free_port
        environ = {"ZRPC_INIT_TIMEOUT": "0.5", "ZRPC_SECRET": "5ec7e7" * 12}
        job = {way: f"127.0.0.1:{port}", "elastic": True, "preload": PRELOAD}
        code, out, err = start("print('started')", environ=environ, **job).finish()
    assert (code, out) == (1, "")
    assert [text for text in texts if text not in err] == [], err


# -- without a launcher process ---------------------------------------------------------------


def test_parse_address() -> None:
    assert parse_address("host:80") == StoreAddress("host", 80)
    assert parse_address("[::1]:80") == StoreAddress("::1", 80)
    assert [str(parse_address(text)) for text in ("host:80", "[::1]:80")] == ["host:80", "[::1]:80"]
    wrong: list[Any] = ["", "host", "host:", ":80", "host:x", "host:0", "host:70000"]
    for text in [*wrong, "tcp://h:80", None]:
        with pytest.raises(ValueError, match=f"expected HOST:PORT, but got {text!r}"):
            parse_address(text)


class StoreStarter:
    """Gets a signal as it starts the store's process, which reports the rank 4 a while after."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.thread = threading.Timer(0.1, self.reply)

    def spawn(self, task: Task, pass_fds: Sequence[int]) -> int:
        self.report = os.dup(pass_fds[0])
        signal.raise_signal(self.number)
        self.thread.start()
        return 1

    def reply(self) -> None:
        with open(self.report, "wb", buffering=0) as file, contextlib.suppress(BrokenPipeError):
            file.write(struct.pack("=q", 4))


@pytest.mark.parametrize(("number", "found"), [(signal.SIGUSR1, 4), (signal.SIGTERM, None)])
def test_only_a_stop_ends_the_wait_for_a_store(number: signal.Signals, found: int | None) -> None:
    starter: Any = StoreStarter(number)
    with SignalInbox(STOPS | FORWARDED) as inbox:
        assert reserve_ranks(starter, {}, StoreAddress("h", 9), 1, True, inbox) == found
        assert inbox.take() == {number}
    starter.thread.join()
