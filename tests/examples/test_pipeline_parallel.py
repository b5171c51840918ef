from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish

DEADLINE = 300.0
LINE = re.compile(
    r"^\[0\] (\d) pieces? +([\d.]+) ms per step +(-?\d+)% saved +loss ([\d.]+) -> ([\d.]+)$", re.M
)


def test_learns_the_same_in_any_number_of_pieces(launch: Callable[..., Outcome]) -> None:
    outcome = launch("pipeline_parallel", 4, "--steps", "4", "--batch", "64", deadline=DEADLINE)
    assert outcome.code == 0, outcome
    runs = LINE.findall(outcome.out)
    assert [run[0] for run in runs] == ["1", "2", "4", "8"], outcome
    firsts = [float(run[3]) for run in runs]
    lasts = [float(run[4]) for run in runs]
    assert max(firsts) - min(firsts) < 1e-3
    assert max(lasts) - min(lasts) < 2e-3
    assert max(lasts) < 0.9 * min(firsts)
    # The saving depends on the machine, but it must be reported correctly.
    times = [float(run[1]) for run in runs]
    for (_, _, saved, _, _), each in zip(runs, times, strict=True):
        assert abs(int(saved) - 100 * (1 - each / times[0])) < 1
    assert "Traceback" not in outcome.err


def test_stages_on_a_device_learn_the_same(commands: Commands, tmp_path: Path) -> None:
    script = tmp_path / "on_a_device.py"
    script.write_text(
        "import runpy\n"
        "from zrpc.testing import fake_device\n"
        "fake_device()\n"
        f"runpy.run_path({str(EXAMPLES / 'pipeline_parallel.py')!r}, run_name='__main__')\n"
    )
    losses = []
    for device in ("cpu", "fake:0"):
        options = ("--steps", "2", "--batch", "8", "--device", device)
        outcome = finish(commands.launch(4, script, *options), DEADLINE)
        assert outcome.code == 0, outcome
        losses.append([run[3:] for run in LINE.findall(outcome.out)])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
