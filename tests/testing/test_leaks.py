import os
import socket
import subprocess
import sys
import threading

import pytest
import zmq

from zrpc.pool import WorkerPool
from zrpc.testing import LeakError, no_leaks
from zrpc.testing.leaks import Resources, lasting
from zrpc.testing.proc import session_members

NO_TIME = 0.0


def test_nothing_left():
    assert Resources.now().left_behind(NO_TIME) == []


def test_a_thread_is_named_with_where_it_is():
    end = threading.Event()
    before = Resources.now()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    [line] = before.left_behind(NO_TIME)
    assert line.startswith("thread forgotten (a daemon), in wait at ")
    end.set()
    thread.join()
    assert before.left_behind(NO_TIME) == []


def test_a_thread_that_is_ending_is_waited_for():
    end = threading.Event()
    before = Resources.now()
    thread = threading.Thread(target=end.wait)
    thread.start()
    timer = threading.Timer(0.05, end.set)
    timer.start()
    assert before.left_behind() == []
    assert not thread.is_alive()


def test_what_was_there_before_may_start_further_threads():
    gates = [threading.Event() for _ in range(3)]

    def blocked(gate):
        return lambda: gate.wait(30)

    old, new = (WorkerPool(3, name) for name in ("old", "new"))
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


def test_descriptors_are_told_with_what_they_point_to(tmp_path):
    before = Resources.now()
    reader, writer = os.pipe()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(tmp_path / "sock"))
    memory = os.memfd_create("zrpc-pool")
    left = "\n".join(before.left_behind(NO_TIME))
    assert f"descriptor {reader}: pipe:[" in left
    assert f"descriptor {writer}: pipe:[" in left
    assert f"descriptor {memory}: /memfd:zrpc-pool" in left
    assert f"descriptor {listener.fileno()}: socket:[" in left
    assert f"bound to {tmp_path / 'sock'}" in left
    for fd in (reader, writer, memory):
        os.close(fd)
    listener.close()
    assert before.left_behind(NO_TIME) == []


def test_a_number_in_use_again_is_found_and_a_moved_file_is_not(tmp_path):
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


def test_processes_running_and_ended():
    before = Resources.now()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        left = before.left_behind(NO_TIME)
        assert f"process {process.pid}: cat" in left
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        left = before.left_behind(NO_TIME)
        assert left == [f"process {process.pid}: cat (has ended; nobody has waited for it)"]
    assert before.left_behind(NO_TIME) == []


def test_a_zeromq_context():
    before = Resources.now()
    context = zmq.Context()
    socket_ = context.socket(zmq.PAIR)
    left = "\n".join(before.left_behind(NO_TIME))
    assert "ZMQbg/IO/0 (a ZeroMQ context that is not terminated)" in left
    assert "anon_inode:[eventfd]" in left
    socket_.close()
    context.term()
    assert before.left_behind() == []


def test_what_a_cycle_holds_is_no_leak():
    class Holder:
        pass

    with pytest.warns(ResourceWarning) if os.environ.get("PYTHONDEVMODE") else no_leaks():
        before = Resources.now()
        holder = Holder()
        holder.file = open("/dev/null")  # noqa: SIM115
        holder.me = holder
        del holder
        assert before.left_behind(NO_TIME) == []


def test_what_is_meant_to_last():
    before = Resources.now()
    with lasting():
        reader, writer = os.pipe()
    extra = os.dup(reader)
    left = before.left_behind(NO_TIME)
    for fd in (reader, writer, extra):
        os.close(fd)
    assert [line.partition(":")[0] for line in left] == [f"descriptor {extra}"]


def test_the_context_manager_finds_socket_files():
    def leave_one():
        with no_leaks(), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(os.environ["ZRPC_RUNTIME_DIR"], "inbox"))

    with pytest.raises(LeakError, match=r"left behind:\n- socket file .*/inbox") as info:
        leave_one()
    path = info.value.left[0].removeprefix("socket file ")
    assert not os.path.exists(os.path.dirname(path))
    assert os.environ.get("ZRPC_RUNTIME_DIR") != os.path.dirname(path)


def test_the_directory_of_a_process_that_was_killed_is_removed(tmp_path, monkeypatch):
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


def test_an_error_goes_first():
    def fail():
        with no_leaks():
            fds.extend(os.pipe())
            raise KeyError("mine")

    fds = []
    with pytest.raises(KeyError, match="mine"):
        fail()
    for fd in fds:
        os.close(fd)


def test_members_of_a_session():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as process:
        assert session_members(process.pid) == [process.pid]
    assert session_members(process.pid) == []
