"""Tests that need a process of their own, since they change it, or look at a fresh one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_process import passes_in_its_own_process
from tests.support.programs import run_python

pytestmark = pytest.mark.system

COMPILED = """
import sys
import zrpc.api, zrpc.autograd, zrpc.nn, zrpc.optim, zrpc.testing.threads
import zrpc
from zrpc.testing import local_mesh

def call():
    return zrpc.rpc_sync("worker1", abs, args=(-2,))

with local_mesh(2) as mesh:
    before = "torch._dynamo" in sys.modules
    import torch
    compiled = torch.compile(call, backend="eager")
    assert mesh.run(0, compiled) == 2
from torch._dynamo.utils import counters
print(before, counters["frames"]["total"])
"""

COLLECTIONS = """
import gc, pickle, signal
from zrpc.runtime.garbage_collector import running

heap = [[number] for number in range(200_000)]  # takes the collector some time
pickled = pickle.dumps(heap)
signal.signal(signal.SIGALRM, signal.default_int_handler)
for act in (lambda: pickle.loads(pickled), gc.collect):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        act()
    except KeyboardInterrupt:
        print("raised", len(running))
"""


# Dynamo changes how a process runs all Python functions. If a signal's handler raises between the
# last two steps of a part, that part may stay begun in its process.
@pytest.mark.parametrize("cases", ["torch_compile_cases", "signal_steps_cases"])
def test_cases_that_change_their_process_pass(cases: str) -> None:
    passes_in_its_own_process(Path(__file__).with_name(f"{cases}.py"))


def test_calls_do_not_import_the_compiler_and_it_compiles_nothing_of_zrpc(tmp_path: Path) -> None:
    """Though zrpc is there first; `torch_compile_cases` imports the compiler before zrpc."""
    assert output(COMPILED, tmp_path) == "False 1"


FRAMES = """
import gc, sys
import zrpc.runtime.garbage_collector

gc.set_threshold(1)
for _ in range(1000):
    frames = sys._current_frames()
print("done")
"""


@pytest.mark.parametrize(
    ("program", "found"),
    [(COLLECTIONS, "raised 0\nraised 0"), (FRAMES, "done")],
    ids=["ctrl-c", "a look at all frames"],
)
def test_a_garbage_collection_in_the_midst_of_code_in_c(
    program: str, found: str, tmp_path: Path
) -> None:
    """It loses no Ctrl-C, and it ends, though Python holds a lock as it looks at all frames.

    In the tests' own process there is an audit hook, which would run code of Python in it.
    """
    assert output(program, tmp_path) == found


def output(program: str, folder: Path) -> str:
    (folder / "program.py").write_text(program)
    done = run_python(str(folder / "program.py"))
    assert not done.returncode, done.stderr
    return done.stdout.strip()
