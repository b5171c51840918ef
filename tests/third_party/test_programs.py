"""Unmodified programs that use other people's libraries do the same on zrpc as on torch's RPC.

What they print on torch's RPC is recorded here. With ZRPC_TORCH_TOO=1 they run there again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.programs import run_python
from zrpc.launch.port import ReservedPort

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
ZRPC = ["-m", "zrpc.cli"]


def run(*arguments: str) -> tuple[str, str]:
    """Runs a Python command, which must succeed; returns its standard output and error."""
    with ReservedPort() as port:
        done = run_python(*arguments, str(port.number))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def assert_prints(recorded: list[str], on_zrpc: list[str], on_torch: list[str]) -> None:
    """Fails unless a program prints these lines on zrpc."""
    ours, note = run(*on_zrpc)
    assert "used zrpc.api" in note
    assert ours.splitlines() == recorded
    if os.environ.get("ZRPC_TORCH_TOO"):
        theirs, other_note = run(*on_torch)
        assert "used torch.distributed.rpc.api" in other_note
        assert theirs.splitlines() == recorded


def test_torchrl_collects_batches_and_updates_weights() -> None:
    program = str(HERE / "collect.py")
    # The policy's weight grows by one after each batch, and the environment adds it up.
    ends = [list(range(1, 11)), list(range(12, 31, 2)), list(range(33, 61, 3))]
    batches = [f"(20,) {counts * 2} [{size}.0]" for size, counts in enumerate(ends, 1)]
    recorded = [*batches, "False COLLECTOR_NODE_1"]
    assert_prints(recorded, [*ZRPC, "run", program], [program])


def test_torch_geometric_looks_features_up() -> None:
    program = str(HERE / "look_up.py")
    launch = [*ZRPC, "launch", "--nprocs", "2"]
    features = [[float(node), node * 10.0] for node in (7, 2, 2, 9, 0)]
    seen = {f"loader-{rank}": 220.0 for rank in range(2)}  # the sum of the features
    recorded = [f"[0] [['loader-0'], ['loader-1']] {features} {seen} True"]
    assert_prints(recorded, [*launch, "--drop-in", program], [*launch, program])
