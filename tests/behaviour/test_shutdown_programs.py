"""The end of whole programs: forgotten, after an exception or an interrupt, and in a fork."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.programs import Programs

Succeed = Callable[..., list[str]]


HEAD = """
import os, signal, sys, threading, time
import torch
import zrpc as rpc

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

ready = threading.Event()

def begin():
    threading.Timer(0.2, ready.set).start()

rpc.init_rpc(f"w{rank}")
assert rpc.rpc_sync(f"w{1 - rank}", torch.add, (torch.ones(1), rank)).item() == 1 + rank
"""


def test_what_is_left_in_a_program_that_goes_on(succeed: Succeed) -> None:
    succeed(
        HEAD
        + """
before = {t.name for t in threading.enumerate()}
assert any(name.startswith("zrpc") for name in before)
rpc.shutdown()
assert [t.name for t in threading.enumerate() if t is not threading.main_thread()] == []
links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{n}")]
assert not [link for link in links if "zrpc" in link or "memfd" in link], links
"""
    )


def test_after_an_exception_nobody_waits(programs: Programs) -> None:
    """A program that an exception ends does not wait for the others; they learn of it."""
    ended = programs.run(
        HEAD
        + """
if rank == 1:
    assert ready.wait(50)
    raise ValueError("the program's own")
try:
    rpc.rpc_sync("w1", begin)
    rpc.rpc_sync("w1", time.sleep, (3600,), timeout=20)
except (rpc.WorkerDied, rpc.RpcError) as error:
    print("told:", type(error).__name__)
rpc.shutdown(timeout=20)
"""
    )
    assert [e.code for e in ended] == [0, 1], ended
    assert "told: WorkerDied" in ended[0].output
    assert "ValueError: the program's own" in ended[1].output
    assert programs.left() == []


def test_an_exit_code_survives(programs: Programs) -> None:
    ended = programs.run(HEAD + "rpc.shutdown()\nsys.exit(3 + rank)\n", stop_others=False)
    assert [e.code for e in ended] == [3, 4], ended


def test_a_fork_of_a_worker_has_no_agent(succeed: Succeed) -> None:
    """Neither from the main thread nor from a handler; and its end disturbs nobody."""
    succeed(
        """
import threading

prepared = threading.Event()  # a handler may run before this program goes on

def fork():
    assert prepared.wait(20)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # kills the child if it waits
        try:
            assert not rpc.is_initialized()
            for use in USES:
                try:
                    use()
                except rpc.NotInitializedError as error:
                    assert use in USES[:3] or "forked" in str(error)
                    continue
                os._exit(9)
            sys.stdout.flush()
            os._exit(7)
        finally:
            os._exit(8)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
        + HEAD
        + """
rref = rpc.remote(f"w{1 - rank}", dict, kwargs={"a": 1})
assert rref.to_here() == {"a": 1}
USES = [
    lambda: rpc.rpc_sync("w0", max, (1, 2), timeout=2),
    rpc.shutdown,
    lambda: rpc.shutdown(graceful=False),
    rref.to_here,
    lambda: rref.rpc_sync().get("a"),
    lambda: rref.rpc_async().get("a"),
    lambda: rref.remote().get("a"),
]
prepared.set()
assert fork() == 7, "from the main thread"
assert rpc.rpc_sync(f"w{1 - rank}", fork, timeout=20) == 7, "from a handler"

pid = os.fork()
if pid == 0:
    sys.exit(6)  # with all that runs at exit
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6

import multiprocessing
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join(20)
assert child.exitcode == 0, child.exitcode
assert rref.to_here() == {"a": 1}
rpc.shutdown()
"""
    )
