"""Examples of models whose parts are on several workers, and of what workers say of themselves."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from tests.examples.example_commands import EXAMPLES, Commands, Launch, finish, losses, number_in


def check_differences(output: str) -> None:
    found = re.findall(r"(\w+): largest difference to one process: (\S+)$", output, re.M)
    differences = {what: float(largest) for what, largest in found}
    assert sorted(differences) == ["loss", "table", "trainer0", "trainer1"], output
    assert max(differences.values()) < 1e-4


def test_trainers_with_ddp_learn_what_one_process_would_learn(launch: Launch) -> None:
    out = launch("ddp_remote_embedding", 4, "--check")
    check_differences(out)
    for trainer in (0, 1):
        values = losses(out, trainer)
        assert len(values) == 6
        assert values[-1] < 0.4 * values[0]


def test_experts_learn_what_one_process_would_learn(launch: Launch) -> None:
    nprocs, steps = 5, 100
    out = launch("mixture_of_experts", nprocs, "--check", "--steps", str(steps))
    values = losses(out)
    assert len(values) == steps // 50
    assert values[-1] < 0.5 * values[0]
    assert number_in(r"largest difference of a loss to one process: (\S+)", out) < 1e-9
    shares = re.findall(r"expert\d was given (\d+)% of the rows", out)
    assert len(shares) == nprocs - 1
    assert min(map(int, shares)) > 5  # all experts have learned something


LINE = re.compile(
    r"^\[0\] (\d) pieces? +([\d.]+) ms per step +(-?\d+)% saved +loss ([\d.]+) -> ([\d.]+)$", re.M
)


def test_a_pipeline_learns_the_same_in_any_number_of_pieces(launch: Launch) -> None:
    runs = LINE.findall(launch("pipeline_parallel", 4, "--steps", "4", "--batch", "64"))
    assert [run[0] for run in runs] == ["1", "2", "4", "8"], runs
    firsts = [float(run[3]) for run in runs]
    lasts = [float(run[4]) for run in runs]
    assert max(firsts) - min(firsts) < 1e-3
    assert max(lasts) - min(lasts) < 2e-3
    assert max(lasts) < 0.9 * min(firsts)
    # The saving depends on the machine, but it must be reported correctly.
    times = [float(run[1]) for run in runs]
    for (_, _, saved, _, _), each in zip(runs, times, strict=True):
        assert abs(int(saved) - 100 * (1 - each / times[0])) < 1


def test_stages_on_a_device_learn_the_same(commands: Commands, tmp_path: Path) -> None:
    script = tmp_path / "on_a_device.py"
    script.write_text(
        "import runpy\n"
        "from zrpc.testing import fake_device\n"
        "fake_device()\n"
        f"runpy.run_path({str(EXAMPLES / 'pipeline_parallel.py')!r}, run_name='__main__')\n"
    )
    found = []
    for device in ("cpu", "fake:0"):
        options = ("--steps", "2", "--batch", "8", "--device", device)
        outcome = finish(commands.launch(4, script, *options))
        assert outcome.returncode == 0, outcome
        found.append([run[3:] for run in LINE.findall(outcome.stdout)])
    assert len(found[0]) == 4
    assert found[0] == found[1]


POINTS = 100_000
DATA = POINTS * 6 * 4  # five columns of x and one of y, in float32


def test_no_data_goes_through_the_coordinator(launch: Launch) -> None:
    out = launch("coordinator", 5, "--points", str(POINTS))
    assert re.search(r"largest error of the 5 weights: 0\.00\d+$", out, re.M)
    found = re.findall(r"(worker\d) received +([\d,]+) bytes of tensors", out)
    assert {name: int(count.replace(",", "")) for name, count in found} == {
        "worker0": 0,
        "worker1": 0,
        "worker2": DATA,
        "worker3": DATA,
        "worker4": (5 * 5 + 5) * 4,
    }


def test_the_slow_worker_shows_in_the_numbers_and_in_the_trace(
    launch: Launch, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    out = launch("slow_worker", 5, "--steps", "10", "--trace", str(path))
    *rows, last = [line.removeprefix("[0] ") for line in out.splitlines()]
    assert [row.split(":")[0] for row in rows] == ["trainer2", "trainer3", "trainer4"]
    assert ["10 steps of" in row for row in rows] == [True, True, True]
    assert ["640 calls" in row for row in rows] == [False, True, False]
    assert last == "the slowest is trainer3"
    events = json.loads(path.read_text())["traceEvents"]
    workers = {
        event["pid"]: event["args"]["name"].split()[0]
        for event in events
        if event["name"] == "process_name"
    }
    loading: dict[str, float] = defaultdict(float)
    for event in events:
        if event["name"] == "load a batch":
            loading[workers[event["pid"]]] += event["dur"]
    assert max(loading, key=lambda name: loading[name]) == "trainer3"
    assert sum(event["name"] == "read_rows" for event in events) == 2 * 10 + 640
