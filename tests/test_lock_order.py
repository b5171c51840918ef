"""Locks are taken in the order that the table in the docs says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
ANY = "any other of these"


def table() -> dict[str, set[str]]:
    """Returns for each module of the table the modules whose locks are taken meanwhile."""
    section = PAGE.read_text().split("## Locks\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`zrpc/.*?) \| .* \| (.*?) \|$", section, re.MULTILINE)
    modules = {module: taken for names, taken in rows for module in named(names)}
    return {
        module: named(taken) if taken != ANY else {*modules} for module, taken in modules.items()
    }


def named(text: str) -> set[str]:
    return {name.replace("/", ".") for name in re.findall(r"`(zrpc/\S*)\.py`", text)}


@pytest.mark.system
def test_each_thread_takes_locks_in_the_order_of_the_docs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lock_order_program"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    order, allowed = json.loads(done.stdout.splitlines()[-1]), table()
    assert len(order) > 10, "the workload takes few locks"
    assert [(held, taken) for held, taken in order if taken not in allowed.get(held, ())] == []
