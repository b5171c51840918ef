"""Whole programs: how they begin and end, and what their main scripts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.programs import Ended, Programs

Succeed = Callable[..., list[str]]

HEAD = """
import gc, os, signal, sys, threading, time
import torch
import zrpc as rpc

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
other = f"w{1 - rank}"
"""
JOIN = """
rpc.init_rpc(f"w{rank}")
assert rpc.rpc_sync(other, torch.add, (torch.ones(1), rank)).item() == 1 + rank
"""


def codes(ended: Sequence[Ended]) -> list[int]:
    return [each.code for each in ended]


# -- the beginning -------------------------------------------------------------------------------


def test_several_meshes_in_turn(succeed: Succeed, programs: Programs, tmp_path: Path) -> None:
    urls = ["env://", f"tcp://127.0.0.1:{programs.port}", f"file://{tmp_path}/store"]
    succeed(
        HEAD
        + f"""
for url in {urls} * 2:
    options = rpc.ZmqRpcBackendOptions(init_method=url, init_timeout=20)
    rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=world_size, rpc_backend_options=options)
    assert rpc.rpc_sync(other, rpc.get_worker_info).name == other
    rpc.shutdown()
"""
    )


def test_beside_a_gloo_group(succeed: Succeed, tmp_path: Path) -> None:
    """Of the same variables, or of the same file."""
    succeed(
        HEAD
        + f"""
import torch.distributed as dist
for url in ("env://", "file://{tmp_path}/shared"):
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


# -- the end -------------------------------------------------------------------------------------


def test_after_an_exception_nobody_waits(programs: Programs) -> None:
    """A program that an exception ends does not wait for the others; they learn of it."""
    ended = programs.run(
        HEAD
        + """
ready = threading.Event()

def stay():
    ready.set()
    time.sleep(3600)
"""
        + JOIN
        + """
if rank == 1:
    assert ready.wait(50)
    raise ValueError("the program's own")
try:
    rpc.rpc_sync("w1", stay, timeout=20)
except rpc.WorkerDied as error:
    print("told:", error)
rpc.shutdown(timeout=20)
"""
    )
    assert codes(ended) == [0, 1], ended
    assert "told: worker w1" in ended[0].output
    assert "ValueError: the program's own" in ended[1].output
    assert programs.left() == []


def test_a_fork_of_a_worker_has_no_agent(succeed: Succeed) -> None:
    """Neither from the main thread nor from a handler; and its end disturbs nobody."""
    succeed(
        HEAD
        + """
prepared = threading.Event()  # a handler may run before this program goes on

def fork():
    assert prepared.wait(20)
    pid = os.fork()
    if pid != 0:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(20)  # kills the child if it waits
    assert not rpc.is_initialized()
    for use in USES:
        try:
            use()
            os._exit(9)
        except rpc.NotInitializedError as error:
            assert use in USES[:3] or "forked" in str(error)
    os._exit(7)
"""
        + JOIN
        + """
rref = rpc.remote(other, dict, kwargs={"a": 1})
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
assert rpc.rpc_sync(other, fork, timeout=20) == 7, "from a handler"

pid = os.fork()
if pid == 0:
    sys.exit(6)  # with all that runs at exit
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6

assert rref.to_here() == {"a": 1}
rpc.shutdown()
"""
    )


def test_a_shutdown_in_a_finalizer(succeed: Succeed, programs: Programs) -> None:
    """Of an object of main, of one in a cycle, of a handler's, and at the interpreter's end."""
    outputs = succeed(
        HEAD
        + """
class Leaves:
    def __init__(self, graceful):
        self.graceful, self.me = graceful, self
    def __del__(self):
        # Whatever the finalizer is told of its state, it has to come back.
        rpc.shutdown(graceful=self.graceful)
        ended.append(self.graceful)

ended = []

def in_a_handler():
    leaves = Leaves(False)
    leaves.me = None

rpc.init_rpc(f"w{rank}")
leaves = Leaves(True)
del leaves
assert ended == []  # it is in a cycle
gc.collect()
assert ended == [True], ended
assert not rpc.is_initialized()

rpc.init_rpc(f"w{rank}")
if rank == 0:
    try:
        rpc.rpc_sync("w1", in_a_handler, timeout=20)
    except rpc.WorkerDied:
        pass
    rpc.shutdown(timeout=20)
else:
    limit = time.monotonic() + 20
    while rpc.is_initialized():
        assert time.monotonic() < limit
        time.sleep(0.01)
at_the_end = Leaves(False)
at_the_end.me = None

# The mesh that is forgotten is shut down at the end, and waits for what is in progress.
def slow():
    time.sleep(0.3)
    open("slow-has-run", "w").close()
"""
        + JOIN
        + 'if rank == 0: rpc.rpc_async("w1", slow)\n',
        cold=True,
    )
    assert (programs.directory / "slow-has-run").exists()
    assert not any("Traceback" in output for output in outputs), outputs


def test_programs_end_though_their_threads_call_on(succeed: Succeed) -> None:
    outputs = succeed(
        HEAD
        + """
def call_on(pause):
    while True:
        try:
            rpc.rpc_sync(other, max, (1, 2))
        except rpc.NotInitializedError:
            return
        time.sleep(pause)

def begin():
    for pause in 0, 0.01:
        threading.Thread(target=call_on, args=(pause,), daemon=True).start()
    rpc.rpc_sync(other, max, (1, 2))

with rpc.session(f"w{rank}"):
    begin()
rpc.init_rpc(f"w{rank}")
begin()
"""
    )
    assert not any("Traceback" in output for output in outputs), outputs


def test_a_failure_is_printed_by_a_caller_that_has_not_waited(programs: Programs) -> None:
    """Without logging set up. The callee prints nothing, and no error that the caller gets."""
    ended = programs.run(
        HEAD
        + """
def fail(text):
    raise ValueError(text)
"""
        + JOIN
        + """
if rank == 0:
    try:
        rpc.rpc_sync(other, fail, ("caught" + " error",))
    except ValueError:
        pass
    rpc.rpc_async(other, fail, ("lost" + " error",))
rpc.shutdown()
sys.exit(3 + rank)  # the codes survive
""",
        stop_others=False,
    )
    assert codes(ended) == [3, 4], ended
    assert "caught error" not in ended[0].output + ended[1].output
    assert ended[0].output.count("nobody waited for it") == 1
    for part in (
        "ValueError: lost error",
        "Traceback (most recent call last)",
        "WorkerInfo(id=1, name=w1)",
    ):
        assert part in ended[0].output
