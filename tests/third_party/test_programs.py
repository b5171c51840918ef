"""Unmodified programs that use other people's libraries do the same on zrpc as on torch's RPC."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zrpc.launch.port import ReservedPort

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
ZRPC = ["-m", "zrpc.cli"]
DEADLINE = 240.0  # the libraries take seconds to import, in each of several processes


def run(*arguments: str) -> tuple[str, str]:
    """Runs a Python command, which must succeed; returns its standard output and error."""
    with ReservedPort() as port:
        port.hand_over()
        done = subprocess.run(
            [sys.executable, *arguments, str(port.number)],
            env={key: value for key, value in os.environ.items() if key != "RANK"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_torchrl_collects_batches_and_updates_weights() -> None:
    program = str(HERE / "collect.py")
    ours, note = run(*ZRPC, "run", program)
    theirs, other_note = run(program)
    assert "used zrpc.api" in note
    assert "used torch.distributed.rpc.api" in other_note
    lines = ours.splitlines()
    assert lines[0].startswith("(20,) [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2,")
    assert [line.rpartition("[")[2] for line in lines[:3]] == ["1.0]", "2.0]", "3.0]"]
    assert lines[3] == "False COLLECTOR_NODE_1"
    assert ours == theirs


def test_torch_geometric_looks_features_up() -> None:
    program = str(HERE / "look_up.py")
    launch = [*ZRPC, "launch", "--nprocs", "2"]
    ours, note = run(*launch, "--drop-in", program)
    theirs, other_note = run(*launch, program)
    assert "used zrpc.api" in note
    assert "used torch.distributed.rpc.api" in other_note
    assert "[['loader-0'], ['loader-1']] [[7.0, 70.0], [2.0, 20.0]" in ours
    assert ours == theirs
