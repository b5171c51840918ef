"""The types that checkers see, by the examples of `examples.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.system


def check(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=FOLDER.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_the_types_and_the_errors_of_the_examples() -> None:
    check("mypy", str(FOLDER / "examples.py"))


def test_pyright_finds_the_types_and_the_errors_of_the_examples() -> None:
    check("pyright", "--pythonpath", sys.executable, "--project", str(FOLDER))
