"""Workers that die, stop or leave: what callers learn, and when; and what is no death."""

from __future__ import annotations

import errno
import os
import queue
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import answers_heartbeats
from tests.support.programs import Programs
from tests.support.settled import caught
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh, faults

pytestmark = pytest.mark.system  # all but a few wait for a time-out or start processes

MakeMesh = Callable[..., Mesh]

LIMIT = 1.5
# What a busy machine may take longer.
SLACK = 4.0
SHORT = {"heartbeat_timeout": LIMIT, "rpc_timeout": 20}


def rest(path: str) -> None:
    """A handler that tells that it has begun, and ends when its file is gone."""
    import pathlib
    import time

    file = pathlib.Path(path)
    file.touch()
    while file.exists():
        time.sleep(0.05)


def error_of(to: int, function: Any, *args: Any) -> tuple[str, str, float]:
    """What a call fails with: the type, the text, and when."""
    try:
        rpc.rpc_sync(to, function, args)
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    return "none", "", 0.0


# -- what has died, stopped or left ----------------------------------------------------------


@pytest.mark.zrpc(workers=3, processes=True, timeout=40, options={**SHORT, "transport": "tcp"})
def test_a_worker_that_is_stopped(mesh: Mesh, tmp_path: Any) -> None:
    assert mesh.run(0, rpc.rpc_sync, 1, max, (1, 2)) == 2  # it is heard
    # Before its first heartbeat is answered, a lost worker is one that could not be reached.
    until(lambda: mesh.run(0, answers_heartbeats, 1), "the first heartbeat")
    pending = mesh.submit(0, error_of, 1, rest, f"{tmp_path}/entered")
    until((tmp_path / "entered").exists)
    stopped = time.time()
    os.kill(mesh.pid(1), signal.SIGSTOP)
    try:
        kind, text, when = pending.result(LIMIT + SLACK)
        assert kind == "WorkerDied"
        assert re.match(r"worker worker1 \(rank 1\) is gone: it no longer answers", text)
        assert "heartbeat_timeout is 1.5 s" in text
        heard = re.search(r"last heard from at \d\d:\d\d:\d\d, (\d+\.\d) s before", text)
        assert heard is not None
        assert 0.5 * LIMIT < float(heard[1]) < LIMIT + 2 * SLACK
        # Not too early, and in time.
        assert 0.5 * LIMIT < when - stopped < LIMIT + SLACK
        assert mesh.run(0, error_of, 1, max, 1, 2)[0] == "WorkerDied"
        assert mesh.run(2, rpc.rpc_sync, 0, max, (1, 2)) == 2
    finally:
        (tmp_path / "entered").unlink()
        os.kill(mesh.pid(1), signal.SIGCONT)
    # It goes on, and learns from the worker that it calls that it was declared dead.
    kind, text, _ = mesh.run(1, error_of, 0, max, 1, 2)
    assert kind == "WorkerDied"
    assert "worker0 (rank 0) is gone: it has declared this worker dead" in text
    assert mesh.run(1, rpc.rpc_sync, 2, max, (1, 2)) == 2  # which had nothing to do with it


@pytest.mark.zrpc(workers=3)
def test_a_worker_that_leaves_was_heard_from(caller: Mesh, gate: Gate) -> None:
    """Its last message may have come a moment ago; that it leaves may be its only one."""
    future = rpc.rpc_async(2, gate.wait_inside)
    gate.await_entry()
    assert rpc.rpc_sync(1, max, (1, 2)) == 2
    lost: queue.SimpleQueue[rpc.WorkerInfo] = queue.SimpleQueue()
    rpc.on_worker_lost(lost.put)
    for left in (1, 2):
        caller.run(left, rpc.shutdown, graceful=False)
        assert lost.get(timeout=SOON).rank == left
        with pytest.raises(rpc.WorkerDied, match="it left the mesh; it was last heard from at"):
            rpc.rpc_sync(left, max, (1, 2))
    with pytest.raises(rpc.WorkerDied, match="it left the mesh; it was last heard from at"):
        future.wait()


@pytest.mark.zrpc(processes=True, timeout=40, options={**SHORT, "shared_memory": 0})
def test_a_worker_that_is_stopped_in_the_midst_of_a_large_message(mesh: Mesh) -> None:
    """What is under way to it must not hold up the heartbeats."""

    def send_to_the_stopped(pid: int) -> str:
        import torch

        tensor = torch.ones(20_000_000)
        rpc.rpc_sync(1, torch.numel, (tensor,))
        os.kill(pid, signal.SIGSTOP)
        futures = [rpc.rpc_async(1, torch.numel, (tensor,)) for _ in range(2)]
        return " ".join({caught(future).__name__ for future in rpc.as_completed(futures)})

    began = time.monotonic()
    try:
        assert mesh.run(0, send_to_the_stopped, mesh.pid(1)) == "WorkerDied"
    finally:
        os.kill(mesh.pid(1), signal.SIGCONT)
    # To pack three tensors of 80 MB takes seconds on a busy machine.
    assert time.monotonic() - began < LIMIT + 4 * SLACK


@pytest.mark.zrpc(workers=3, processes=True, timeout=40)
def test_a_killed_worker_is_named_within_a_second(mesh: Mesh, tmp_path: Any) -> None:
    pending = [mesh.submit(rank, error_of, 1, rest, f"{tmp_path}/{rank}") for rank in (0, 2)]
    for rank in (0, 2):
        until((tmp_path / str(rank)).exists)
    killed = time.time()
    os.kill(mesh.pid(1), signal.SIGKILL)
    for future in pending:
        kind, text, when = future.result(SLACK)
        assert kind == "WorkerDied"
        assert text.startswith("worker worker1 (rank 1) is gone: its process has exited")
        assert re.search(r"last heard from at \d\d:\d\d:\d\d, \d\.\d s before", text)
        assert when - killed < 1.0
    mesh.kill(1)
    # The others are there, and end gracefully.
    assert mesh.run(2, rpc.rpc_sync, 0, max, (1, 2)) == 2
    for each in [mesh.submit(rank, rpc.shutdown) for rank in (0, 2)]:
        each.result(SOON)


# What they share, in hexadecimal digits.
SECRET = "5ec7e7" * 12

TWO_HOSTS = """
import os, time
import zrpc as rpc
from zrpc.agent.current import current_agent

rank = int(os.environ["RANK"])
options = rpc.ZmqRpcBackendOptions(heartbeat_timeout=50, rpc_timeout=50)
rpc.init_rpc(f"w{rank}", rpc_backend_options=options)
if rank == 0:
    assert not current_agent().membership.shares_host(1)
    assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    began = time.monotonic()
    while current_agent().liveness.silence(1) != 0.0:
        assert time.monotonic() < began + 10, "no heartbeat was answered"
        time.sleep(0.02)
    began = time.monotonic()
    try:
        rpc.rpc_sync("w1", os._exit, (0,))
    except rpc.WorkerDied as error:
        print(error)
    assert time.monotonic() - began < 10
    rpc.shutdown()
else:
    time.sleep(50)
"""


def test_a_worker_of_another_host_that_dies(programs: Programs) -> None:
    """Its host refuses connections at once: no time-out has to pass."""
    # Not below tmp_path, which is too long for a socket.
    with tempfile.TemporaryDirectory(prefix="zrpc-test-") as other:
        pids = [
            programs.start(TWO_HOSTS, 0, 2, ZRPC_SECRET=SECRET),
            programs.start(TWO_HOSTS, 1, 2, ZRPC_SECRET=SECRET, ZRPC_RUNTIME_DIR=other),
        ]
        ended = programs.wait(pids[0], 0)
        assert ended.code == 0, ended
        assert "worker w1 (rank 1) is gone: its process has exited" in ended.output
        assert programs.wait(pids[1], 1).code == 0


# -- what is no death ------------------------------------------------------------------------


@pytest.mark.zrpc(processes=True, options={**SHORT, "shared_memory": 0}, timeout=60)
def test_a_held_interpreter_and_a_large_message_are_no_silence(mesh: Mesh) -> None:
    def hold_the_interpreter(seconds: float) -> str:
        import ctypes

        # Unlike CDLL, PyDLL keeps the interpreter's lock.
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return "done"

    def both_ways() -> int:
        import torch

        tensor = torch.ones(20_000_000)
        return rpc.rpc_sync(1, torch.neg, (tensor,)).numel()

    # Neither the one that is held up nor the one that waits for it gives up the other.
    assert mesh.run(0, rpc.rpc_sync, 1, hold_the_interpreter, (2.0,)) == "done"
    assert mesh.run(0, both_ways) == 20_000_000
    assert mesh.run(1, rpc.rpc_sync, 0, max, (1, 2)) == 2


@pytest.mark.zrpc(workers=3, processes=True, options={"heartbeat_timeout": 0.8})
def test_a_mesh_that_is_stopped_as_a_whole_goes_on(mesh: Mesh) -> None:
    """As by Ctrl-Z and fg: nobody was silent longer than anybody else."""

    def call_all() -> list[int]:
        return [rpc.rpc_sync(to, max, (1, 2)) for to in range(3)]

    assert mesh.run_all(call_all) == [[2] * 3] * 3
    with faults.pause(mesh, 0), faults.pause(mesh, 1), faults.pause(mesh, 2):
        time.sleep(1.0)
    assert mesh.run_all(call_all) == [[2] * 3] * 3
    time.sleep(0.8)  # what was noticed late would be believed by now
    assert mesh.run_all(call_all) == [[2] * 3] * 3


@pytest.mark.zrpc(options={"heartbeat_timeout": 0.8})
def test_without_heartbeats_nobody_is_silent(mesh: Mesh, monkeypatch: Any, caplog: Any) -> None:
    agent = mesh.agent(0)
    tried = threading.Semaphore(0)

    def fail(*_: Any) -> None:
        tried.release()
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(agent.network.heartbeats, "watch", fail)
    assert mesh.run(0, rpc.rpc_sync, 1, echo, (1,)) == 1
    for _ in range(2):  # the second time a second later, which is longer than the limit
        assert tried.acquire(timeout=SOON)
    assert mesh.run(0, rpc.rpc_sync, 1, echo, (1,)) == 1
    assert "WorkerInfo(id=1, name=worker1) can't be asked for heartbeats" in caplog.text


# -- hooks -----------------------------------------------------------------------------------


@pytest.mark.zrpc(workers=3)
def test_hooks_are_called_for_present_and_for_lost_workers(caller: Mesh, caplog: Any) -> None:
    names: list[str] = []
    told: list[tuple[str, int, str]] = []

    def call_another(worker: rpc.WorkerInfo) -> None:
        # It may make calls, since it runs in no thread that receives.
        told.append((worker.name, rpc.rpc_sync(2, echo, (7,)), threading.current_thread().name))

    rpc.on_worker_joined(lambda worker: names.append(worker.name))
    until(lambda: names == ["worker1", "worker2"], lambda: str(names))
    rpc.on_worker_lost(lambda worker: names.append(worker.name)).remove()
    rpc.on_worker_lost(lambda worker: 1 / 0)
    rpc.on_worker_lost(call_another)
    caller.run(1, rpc.shutdown, graceful=False)
    until(lambda: told)
    # Those that come later are told as well.
    rpc.on_worker_lost(call_another)
    until(lambda: len(told) == 2)
    assert told[0][:2] == told[1][:2] == ("worker1", 7)
    assert "-io" not in told[0][2]
    assert names == ["worker1", "worker2"]
    assert sum("ZeroDivisionError" in (r.exc_text or "") for r in caplog.records) == 1


def test_a_graceful_shutdown_loses_nobody(make_mesh: MakeMesh) -> None:
    names: list[str] = []
    for _ in range(5):
        mesh = make_mesh(workers=4)
        for rank in range(4):
            with mesh.agent(rank).as_current():
                rpc.on_worker_lost(lambda worker: names.append(worker.name))
        mesh.run_all(rpc.shutdown)
    assert names == []


# -- two workers of which only one can connect to the other, as behind a firewall ----------------


def tcp(heartbeat_timeout: float = 1.5) -> pytest.MarkDecorator:
    options = {"transport": "tcp", "heartbeat_timeout": heartbeat_timeout}
    return pytest.mark.zrpc(workers=3, timeout=60, options=options)


@pytest.fixture
def unreachable() -> Iterator[str]:
    """An address at which connections are neither accepted nor refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        yield f"tcp://127.0.0.1:{address[1]}"
        for filler in fillers:
            filler.close()


@pytest.fixture
def one_way(mesh: Mesh, unreachable: str) -> str:
    """Worker 1 can't connect to worker 0, which can connect to worker 1; returns the address."""
    network = mesh.agent(1).network
    network.connect([unreachable, *(network.endpoint(rank) for rank in (1, 2))])
    return unreachable


@tcp()
@pytest.mark.parametrize("caller", [0, 1])
def test_a_call_fails_and_names_the_direction(mesh: Mesh, one_way: str, caller: int) -> None:
    """That of worker 0 arrives, and its answer does not."""
    errors = {0: rf"worker1 \(rank 1\) is gone: it could not connect .*has tried {one_way}"}
    errors[1] = f"no connection to it at {one_way} could be made"
    call = mesh.submit(caller, rpc.rpc_sync, 1 - caller, echo, (1,), timeout=0)
    with pytest.raises(rpc.WorkerDied, match=errors[caller]):
        call.result(SOON)
    with pytest.raises(rpc.WorkerDied, match=errors[1 - caller]):
        mesh.run(1 - caller, rpc.rpc_sync, caller, echo, (1,), timeout=0)
    assert mesh.run(0, rpc.rpc_sync, 2, echo, (1,)) == 1


@tcp(10)
def test_a_timeout_names_the_direction(mesh: Mesh, one_way: str) -> None:
    own = mesh.agent(0).network.tcp_endpoint
    with pytest.raises(rpc.RpcTimeoutError, match=f"not connected to this worker at {own} so far"):
        mesh.run(0, rpc.rpc_sync, 1, echo, (1,), timeout=1.0)
    text = f"no connection to it at {one_way} has been made so far"
    with pytest.raises(rpc.RpcTimeoutError, match=text):
        mesh.run(1, rpc.rpc_sync, 0, echo, (1,), timeout=1.0)
    # The next tests see that a shutdown of all ends: here it would wait for the lost connection.
    mesh.shutdown(graceful=False)


@tcp()
@pytest.mark.usefixtures("one_way")
@pytest.mark.parametrize("calls", [0, 1])
def test_the_shutdown_of_all_ends(caller: Mesh, calls: int) -> None:
    pending = [rpc.rpc_async(1, echo, (1,), timeout=0) for _ in range(calls)]
    until(lambda: caller.agent(1).dispatcher.received.get(0, 0) >= calls)
    for future in [caller.submit(rank, rpc.shutdown) for rank in range(3)]:
        future.result(SOON)
    for call in pending:
        with pytest.raises(rpc.WorkerDied):
            call.wait()
