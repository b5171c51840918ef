"""Finding leaks: threads, processes, descriptors, ZeroMQ contexts, socket files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from zrpc.runtime.thread_pool import HandlerPool
from zrpc.testing import no_leaks
from zrpc.testing.leaks import Resources, lasting

NO_TIME = 0.0


def test_an_older_pool_may_start_further_threads() -> None:
    gates = [threading.Event() for _ in range(3)]

    def blocked(gate: threading.Event) -> Callable[[], bool]:
        return lambda: gate.wait(30)

    old, new = (HandlerPool(3, name) for name in ("old", "new"))
    old.submit(blocked(gates[0]))
    before = Resources.now()
    old.submit(blocked(gates[1]))
    new.submit(blocked(gates[2]))
    [line] = before.left_behind(NO_TIME)
    assert line.startswith("thread new-0 (a daemon)")
    for gate in gates:
        gate.set()
    assert old.close(30)
    assert new.close(30)


def test_a_descriptor_is_reported_with_its_target_unless_it_may_last() -> None:
    before = Resources.now()
    memory = os.memfd_create("zrpc-pool")
    with lasting():
        kept = os.pipe()
    [line] = before.left_behind(NO_TIME)
    assert line.startswith(f"descriptor {memory}: /memfd:zrpc-pool")
    for fd in (memory, *kept):
        os.close(fd)
    assert before.left_behind(NO_TIME) == []


def test_a_reused_number_is_a_leak_and_a_moved_file_is_not(tmp_path: Path) -> None:
    moved = os.open(tmp_path, os.O_RDONLY)
    reused = os.open("/dev/null", os.O_RDONLY)
    before = Resources.now()
    other = os.dup(moved)
    os.close(moved)
    os.close(reused)
    reader, writer = os.pipe()
    try:
        left = before.left_behind(NO_TIME)
        assert [line.partition(":")[0] for line in left] == [
            f"descriptor {fd}" for fd in sorted((reader, writer))
        ]
    finally:
        for fd in (other, reader, writer):
            os.close(fd)


@pytest.mark.system
def test_zombies_are_reported() -> None:
    before = Resources.now()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        left = before.left_behind(NO_TIME)
        assert left == [f"process {process.pid}: cat (a zombie: it was not waited for)"]
    assert before.left_behind(NO_TIME) == []


def test_a_zeromq_context_is_reported() -> None:
    before = Resources.now()
    context = zmq.Context()
    socket_ = context.socket(zmq.PAIR)
    left = "\n".join(before.left_behind(NO_TIME))
    assert "ZMQbg/IO/0 (a ZeroMQ context that is not terminated)" in left
    assert "anon_inode:[eventfd]" in left
    socket_.close()
    context.term()
    assert before.left_behind() == []


def test_a_file_held_by_a_cycle_is_no_leak() -> None:
    class Holder:
        pass

    with pytest.warns(ResourceWarning) if os.environ.get("PYTHONDEVMODE") else no_leaks():
        before = Resources.now()
        holder = Holder()
        holder.file = open("/dev/null")  # noqa: SIM115
        holder.me = holder
        del holder
        assert before.left_behind(NO_TIME) == []


@pytest.mark.system
def test_the_directory_of_a_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("zrpc.transport.address._LONGEST_PATH", 200)
    code = """
import os, signal
from zrpc.testing import no_leaks
with no_leaks():
    print(os.environ["ZRPC_RUNTIME_DIR"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    head = "from zrpc.transport import address; address._LONGEST_PATH = 200"
    killed = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True)
    assert os.path.isdir(killed.stdout.strip())
    with no_leaks():
        assert not os.path.exists(killed.stdout.strip())
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []
