from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.examples.example_commands import Outcome


def test_the_slow_worker_shows_in_the_numbers_and_in_the_trace(
    launch: Callable[..., Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    outcome = launch("slow_worker", 5, "--steps", "10", "--trace", str(path))
    assert outcome.code == 0, outcome
    *rows, last = [line.removeprefix("[0] ") for line in outcome.out.splitlines()]
    assert [row.split(":")[0] for row in rows] == ["trainer2", "trainer3", "trainer4"]
    assert [("10 steps of" in row, "640 calls" in row) for row in rows] == [
        (True, False),
        (True, True),
        (True, False),
    ]
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
