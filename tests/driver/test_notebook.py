"""start_mesh in a notebook, which a real kernel runs, and in IPython."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.programs import run_python
from tests.support.waiting import until
from zrpc.testing.procfs import state_of

nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install -e '.[test]'")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[test]'")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install -e '.[test]'")

SECONDS = 180
_INTERRUPTED = "# interrupted when its worker has begun"
_CELLS = {
    "start": """
import os, time, zrpc
mesh = zrpc.start_mesh({"learner": 1, "rollout": 1})
print(*mesh.pids.values())""",
    "first": """
scale = 2
def work(x):
    print("working")
    return scale * x
class Box:
    def __init__(self, value):
        self.value = value
    def get(self):
        return self.value
box = zrpc.remote("rollout0", Box, args=(5,))
zrpc.rpc_sync("learner0", work, args=(4,)), box.rpc_sync().get(), type(box.to_here()) is Box""",
    "redefined": """
scale = 3
def work(x):
    return "new", scale * x
class Box(Box):
    def get(self):
        return "new", self.value
zrpc.rpc_sync("learner0", work, args=(4,)), zrpc.remote(0, Box, args=(6,)).rpc_sync().get()""",
    "module": """
%load_ext autoreload
%autoreload 2
import pathlib
file = pathlib.Path("edited_by_the_notebook.py")
file.write_text("def version(): return 1")
import edited_by_the_notebook as edited
zrpc.rpc_sync("rollout0", edited.version)""",
    "edit": """
file.write_text("def version(): return 'another'")
later = time.time() + 5
os.utime(file, (later, later))""",
    "edited": """
edited.version(), zrpc.rpc_sync("rollout0", edited.version)""",
    "home": """
hits = []
def callback(x):
    hits.append(x)
def call(function):
    zrpc.rpc_sync("driver", function, args=(1,))
    return function
zrpc.rpc_sync("rollout0", call, args=(callback,)) is callback, hits""",
    "busy": """
asked = zrpc.rpc_async("rollout0", lambda: zrpc.rpc_sync("driver", os.getpid))
while not asked.done():
    pass
asked.wait() == os.getpid()""",
    "flood": """
def flood():
    for i in range(20_000):
        print(i)
zrpc.rpc_sync("learner0", flood)
time.sleep(1.5)""",
    "interrupted": f"""{_INTERRUPTED}
def wait():
    print("begun", flush=True)
    zrpc.current_call().wait_cancelled(60)
    print("cancelled:", zrpc.current_call().cancelled, flush=True)
zrpc.rpc_sync("rollout0", wait)""",
    "after": """
zrpc.rpc_sync("rollout0", max, args=(1, 2))
time.sleep(0.5)""",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cells have shown, by their names."""
    made = {name: nbformat.v4.new_code_cell(source) for name, source in _CELLS.items()}
    notebook = nbformat.v4.new_notebook(cells=list(made.values()))

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, message: Any, cell: Any, index: int) -> Any:
            output = super().process_message(message, cell, index)
            if _INTERRUPTED in cell.source and "begun" in str(message["content"].get("text")):
                interrupts.append(asyncio.ensure_future(self.km.interrupt_kernel()))
            return output

    interrupts: list[Any] = []
    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    Client(
        notebook, timeout=SECONDS, allow_errors=True, kernel_name="python3", resources=resources
    ).execute()
    return {name: _Shown(cell) for name, cell in made.items()}


class _Shown:
    """What one cell has shown."""

    def __init__(self, cell: Any) -> None:
        outputs = cell.outputs
        self.stdout = "".join(o.text for o in outputs if o.get("name") == "stdout")
        self.stderr = "".join(o.text for o in outputs if o.get("name") == "stderr")
        self.result = next((o.data["text/plain"] for o in outputs if "data" in o), None)
        self.error = next((o.ename for o in outputs if o.output_type == "error"), None)


def test_functions_and_classes_of_cells_run_on_workers(cells: dict[str, Any]) -> None:
    """Also redefined ones, and callbacks; and cells may compute while they serve."""
    # On a busy machine the worker's output may come when the next cell runs.
    shown = "".join(cell.stdout for cell in cells.values())
    assert shown.count("[learner0] working\n") == 1
    for name, result in (
        ("first", "(8, 5, True)"),
        ("redefined", "(('new', 12), ('new', 6))"),
        ("home", "(True, [1])"),
        ("busy", "True"),
    ):
        assert cells[name].result == result


def test_a_module_that_is_edited_is_reported_once(cells: dict[str, Any]) -> None:
    assert cells["module"].result == "1"
    assert cells["edited"].result == "('another', 1)"
    told = "the module edited_by_the_notebook was edited. Workers that have imported it run its old"
    assert [name for name, cell in cells.items() if told in cell.stderr] == ["edited"]


def test_a_flood_is_throttled_and_what_is_left_out_is_counted(cells: dict[str, Any]) -> None:
    lines = cells["flood"].stdout.splitlines()
    counts = [int(line.split()[2].replace(",", "")) for line in lines if "left out" in line]
    assert counts
    assert len(lines) - len(counts) + sum(counts) == 20_000
    assert len(lines) < 10_000


def test_an_interrupt_cancels_the_call_on_the_worker(cells: dict[str, Any]) -> None:
    assert cells["interrupted"].error == "KeyboardInterrupt"
    both = cells["interrupted"].stdout + cells["after"].stdout
    assert "[rollout0] cancelled: True" in both
    assert cells["after"].error is None


def test_workers_end_with_their_kernel(cells: dict[str, Any]) -> None:
    pids = cells["start"].stdout.split()
    until(lambda: all(state_of(int(pid)) == "" for pid in pids))


def test_ipython_needs_no_file_and_leaves_without_an_error() -> None:
    source = """
import zrpc
mesh = zrpc.start_mesh(1)
def f(): return "answer", zrpc.get_worker_info().name

print(zrpc.rpc_sync(0, f))
print(await zrpc.rpc_async(0, f))
"""
    options = ("--simple-prompt", "--no-banner", "--colors=NoColor")
    done = run_python("-m", "IPython", *options, stdin=source, warm=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("('answer', 'worker0')") == 2, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
