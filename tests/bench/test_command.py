"""Tests of the ``zrpc bench`` command."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from tests.support.programs import run_python
from tests.support.warm import warm_commands
from zrpc.bench import plot
from zrpc.bench.rows import GROUPS, all_rows
from zrpc.bench.scale import MEASURES
from zrpc.cli import main


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def test_one_row_end_to_end(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--rows", "empty call", "--seconds", "0.01"]
    files = ["--json", "run.json", "--plot", "run.png"]
    done = run_python("-m", "zrpc.cli", "bench", *options, *files, cwd=tmp_path, warm=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "round 1 of 1: calls\n"
    lines = done.stdout.splitlines()
    assert " cores of " in lines[0]
    assert "libzmq" in lines[1]
    row = next(line for line in lines if line.startswith("empty call"))
    assert "µs ZeroMQ " in row
    data = json.loads((tmp_path / "run.json").read_text())
    (found,) = data["rows"]
    assert set(found["rounds"]) == {"torch", "zrpc", "limit"}
    assert found["times_faster"]["low"] <= found["times_faster"]["high"]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_scale_measures_and_also_computes_what_was_not_measured(tmp_path: Path) -> None:
    data_file, plot_file = tmp_path / "s.json", tmp_path / "s.png"
    done = invoke(
        *("scale", "--workers", "3,2", "--compute", "256", "--keys", "--against", "nothing"),
        *("--json", str(data_file), "--plot", str(plot_file)),
    )
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if line.startswith("zrpc")]
    assert [row[1:3] for row in rows] == [["2", "measured"], ["3", "measured"], ["256", "computed"]]
    *points, computed = json.loads(data_file.read_text())["points"]
    assert [(point["library"], point["workers"]) for point in points] == [("zrpc", 2), ("zrpc", 3)]
    assert all(set(point["values"]) == set(MEASURES) for point in points)
    assert [point["computed"] for point in (*points, computed)] == [False, False, True]
    assert plot_file.stat().st_size > 1000


def test_ctrl_c_shows_what_was_measured_and_leaves_no_process() -> None:
    command = ["-m", "zrpc.cli", "bench", "--against", "nothing", "--rows", "hops"]
    process = subprocess.Popen(
        [warm_commands().python, *command, "--seconds", "3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "round 1 of 5: calls\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "nested calls, 8 hops" in out
    assert err == "interrupted\n"


def test_bad_arguments_are_explained() -> None:
    for arguments, error in (
        (["--rows", "no such row"], "no row matches 'no such row'; the rows are:"),
        (["--rows", "("], "is not a regular expression"),
        (["--rounds", "0"], "0 is not in the range x>=1"),
        (["--seconds", "-1"], "-1.0 is not in the range x>=0"),
        (["--deadline", "0"], "0.0 is not in the range x>0"),
        (["--deadline", "inf"], "expected a finite number, but got inf"),
        (["--seconds", "nan"], "expected a finite number, but got nan"),
        (
            ["--against", "gloo"],
            "'gloo' is not one of 'torch', 'ray', 'monarch', 'rpyc', 'nothing'",
        ),
        (["--json", "/no/such/place/f.json"], "there is no directory /no/such/place for f.json"),
        (["--json", "/proc/f.json"], "/proc/f.json can't be written: "),
        (["--plot", "f.docx"], "--plot draws a .png, .svg or .pdf, but got f.docx"),
        (["--plot", "f.png", "--against", "nothing"], "--plot draws a comparison"),
        (["scale", "--workers", "1,2"], "at least 2 workers, but got 1"),
        (["scale", "--workers", "few"], "expected numbers separated by commas, but got 'few'"),
        (["--rounds", "1", "scale"], "--rounds before `scale` has no effect"),
        (["no-such-command"], "No such command 'no-such-command'"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert error in result.output


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "can_plot", lambda: False)
    result = invoke("--plot", "f.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.output


def test_help_names_the_rows_that_are_left_out_by_default() -> None:
    help_text = " ".join(invoke("--help").output.split())
    default = help_text.partition("[default: all but ")[2].partition("]")[0]
    left_out = [each.name for each in GROUPS if not any(row.default for row in each.rows)]
    assert "start" in left_out
    assert [name for name in left_out if name not in default] == []


def test_neither_the_command_nor_the_process_that_measures_imports_torch() -> None:
    """It measures other processes; importing torch would make each start seconds slower."""
    code = """
import sys
from zrpc.cli import main
from zrpc.cli.bench_options import write_data
for option in ("--help", "--list"):
    main(["bench", option], standalone_mode=False)
heavy = {"torch", "zmq", "numpy", "matplotlib", "rich"}
assert not heavy & set(sys.modules), "imported"
import zrpc.bench.run, zrpc.bench.rows, zrpc.bench.table, zrpc.bench.plot
import zrpc.bench.progress, zrpc.bench.scale, zrpc.bench.machine
assert not {"torch", "matplotlib", "rich"} & set(sys.modules), "imported"
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n".join([*(row.name for row in all_rows()), ""]))


def test_tensors_on_a_device_are_measured_beside_a_copy_there() -> None:
    done = invoke(
        *("--device", "fake", "--against", "nothing", "--rounds", "1", "--seconds", "0.01"),
        *("--rows", "one way, 1 MiB|echo, 4 KiB|echo, 100 tensors|empty call"),
    )
    assert done.exit_code == 0, done.output
    assert "tensors on fake:0" in done.output
    rows = [line for line in done.output.splitlines() if "device copy" in line]
    assert [row[:8] for row in rows] == ["echo, 4 ", "one way,", "echo, 10"]


def test_a_device_that_can_not_be_measured_is_refused() -> None:
    without_gpu = [] if torch.cuda.is_available() else [(["--device", "cuda"], "finds 0 of type")]
    for arguments, reason in (
        *without_gpu,
        (["--device", "fake:2"], "finds 2 of type fake"),
        (["--device", "nothing"], "such as cuda or cuda:1, but got 'nothing'"),
        (["--device", "cpu"], "other than the CPU"),
        (["--device", "fake", "--tcp"], "remove --tcp"),
        (["--device", "fake", "--rows", "empty call"], "no row that matches empty call"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert reason in " ".join(done.output.replace("│", "").split())
