from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish

# Runs a script, then prints how many bytes of messages this process received through ZeroMQ.
METER = """\
import atexit, os, runpy, sys, zmq

received = 0
plain_recv = zmq.Socket.recv

def recv(self, *args, **kwargs):
    global received
    message = plain_recv(self, *args, **kwargs)
    received += len(message)
    return message

zmq.Socket.recv = recv
atexit.register(lambda: print(f"all messages: {received}", flush=True))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
POINTS = 100_000
DATA = POINTS * 6 * 4  # five columns of x and one of y, in float32


def tensor_bytes(output: str) -> dict[str, int]:
    found = re.findall(r"(worker\d) received +([\d,]+) bytes of tensors", output)
    return {name: int(count.replace(",", "")) for name, count in found}


def test_no_data_goes_through_the_coordinator(launch: Callable[..., Outcome]) -> None:
    outcome = launch("coordinator", 5, "--points", str(POINTS))
    assert outcome.code == 0, outcome
    assert re.search(r"largest error of the 5 weights: 0\.00\d+$", outcome.out, re.M)
    assert tensor_bytes(outcome.out) == {
        "worker0": 0,
        "worker1": 0,
        "worker2": DATA,
        "worker3": DATA,
        "worker4": (5 * 5 + 5) * 4,
    }


def test_messages_to_the_coordinator_are_small(commands: Commands, tmp_path: Path) -> None:
    meter = tmp_path / "meter.py"
    meter.write_text(METER)
    script = EXAMPLES / "coordinator.py"
    outcome = finish(commands.launch(5, meter, script, "--points", str(POINTS)))
    found = re.findall(r"^\[(\d)\] all messages: (\d+)", outcome.out, re.M)
    received = {int(rank): int(count) for rank, count in found}
    assert sorted(received) == [0, 1, 2, 3, 4], outcome
    assert 0 < received[0] < 20_000  # answers, reference counts, and the shutdown
