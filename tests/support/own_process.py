"""Tests that run in a process of their own, since they change it for the tests after them."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_python


def passes_in_its_own_process(cases: Path) -> None:
    """Runs the tests of a file whose name pytest does not look for, and fails with their output."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    done = run_python("-m", "pytest", *options, str(cases), warm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
