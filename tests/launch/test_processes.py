"""spawn: a function in several processes that are workers."""

from __future__ import annotations

from pathlib import Path

import pytest

import zrpc
from tests.support.programs import run_python
from zrpc.launch.port import ReservedPort

pytestmark = pytest.mark.system

_SCRIPT = """
import os
import sys
from pathlib import Path

import torch
import zrpc


def work(rank, directory, factor):
    with zrpc.session() as worker:
        answer = zrpc.rpc_sync((rank + 1) % 2, report, args=(factor,))
        Path(directory, f"{worker.name}").write_text(f"{answer} {torch.get_num_threads()}")


def report(factor):
    return f"{zrpc.get_worker_info().name} {os.environ['WORLD_SIZE']} {factor}"


def fails(rank):
    if rank == 1:
        raise KeyError("mine")


if __name__ == "__main__":
    zrpc.spawn(work, (sys.argv[1], 7), nprocs=2)
    say = lambda rank: print("lambda", rank, flush=True)
    context = zrpc.spawn(say, start_method="fork", join=False)
    while not context.join():
        pass
    try:
        zrpc.spawn(fails, nprocs=2, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as error:
        print("raised", "KeyError: 'mine'" in str(error))
"""


def run(*command: str, **env: str) -> str:
    done = run_python(*command, warm=True, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_of_a_script_are_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    found = tmp_path / "found"
    found.mkdir()
    # As if a launcher had started the script itself as one of its workers.
    output = run(str(script), str(found), RANK="5", WORLD_SIZE="9", ZRPC_WORKER_NAME="outer")
    assert {path.name: path.read_text() for path in found.iterdir()} == {
        f"worker{rank}": f"worker{(rank + 1) % 2} 2 7 1" for rank in range(2)
    }
    assert output.splitlines() == ["lambda 0", "raised True"]


_NO_GUARD = """
import zrpc

def work(rank):
    with zrpc.session() as worker:
        print(worker.name, flush=True)

"""


@pytest.mark.parametrize(
    "call", ["zrpc.spawn(work)", "zrpc.spawn(work, join=False, start_method='forkserver').join()"]
)
def test_a_script_without_a_guard_is_told_in_a_sentence(tmp_path: Path, call: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(_NO_GUARD + call)
    done = run_python(str(script), warm=True)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: expected zrpc.spawn to be called under `if __name__")
    assert done.stderr.count("Traceback") == 1


def test_a_script_from_standard_input_runs() -> None:
    """Its functions can't be imported: there is no file that defines them."""
    done = run_python(stdin=_NO_GUARD + "zrpc.spawn(work)")
    assert done.stdout == "worker0\n", done.stderr


_PARENT = """
import os
import zrpc
from zrpc.membership.launched import own_environment

def work(rank, first, size):
    zrpc.init_rpc(f"worker{rank}", rank=rank + first, world_size=size)
    zrpc.shutdown()

def port():
    return os.environ.get("MASTER_PORT")

def join(children, rank):
    zrpc.init_rpc("parent", rank=rank, world_size=3)
    print(zrpc.rpc_sync("worker1", port) == port())
    zrpc.shutdown()
    while not children.join():
        pass

if __name__ == "__main__":
    before = dict(os.environ)
    others = zrpc.spawn(abs, join=False, start_method="fork")
    children = zrpc.spawn(work, (0, 3), 2, join=False, start_method="fork")
    while not others.join():
        pass  # that they end does not change what the others meet by
    join(children, 2)
    assert os.environ == before == own_environment()  # of the mesh, nothing is left here
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", {port!r}
    join(zrpc.spawn(work, (1, 3), 2, join=False, start_method="fork"), 0)
"""


def test_the_parent_may_be_one_more_worker(tmp_path: Path) -> None:
    """They meet at a port that it knows, or where it says, as in programs for torch."""
    script = tmp_path / "script.py"
    with ReservedPort() as port:
        script.write_text(_PARENT.replace("{port!r}", repr(str(port.number))))
        assert run(str(script)).splitlines() == ["False", "True"]


def test_at_least_one_process() -> None:
    with pytest.raises(ValueError, match="nprocs must be at least 1, but got 0"):
        zrpc.spawn(print, nprocs=0)


_VALUES = """
import threading
import torch
import torch.multiprocessing as mp
import zrpc

class Thing: pass

LOCK = threading.Lock()
STEPS = []

def register(step):
    with LOCK:
        STEPS.append(step)

def check(rank, small, script, queue, more):
    assert small.dtype is torch.float8_e4m3fn
    assert script(torch.ones(1)).shape == (1,)
    queue.put(more["double"](rank + 2))

def of_main(rank, thing):
    register(thing)
    assert type(thing) is Thing and STEPS == [thing]

if __name__ == "__main__":
    def only_here(): return "only here"

    queue = mp.get_context("spawn").Queue()
    small, script = torch.ones(2).to(torch.float8_e4m3fn), torch.jit.script(torch.nn.Linear(1, 1))
    zrpc.spawn(check, (small, script, queue, {"double": lambda x: 2 * x, "again": queue}))
    print(queue.get())
    zrpc.spawn(lambda rank, thing, go: go(rank, thing), (Thing(), of_main))
    shared = torch.zeros(1).share_memory_()
    shared.step = 3
    def fill(rank, shared):
        print(only_here(), flush=True)
        shared.fill_(shared.step)

    zrpc.spawn(fill, (shared,))
    print(shared.item())
    try:
        zrpc.spawn(of_main, (["a", LOCK],))
    except zrpc.SerializationError as error:
        print("lock" in str(error))
"""


def test_arguments_are_sent_as_in_calls_and_shared_as_with_multiprocessing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_VALUES)
    assert run(str(script)).splitlines() == ["4", "only here", "3.0", "True"]
