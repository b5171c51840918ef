"""Code that ``torch.compile`` compiles uses zrpc, in a process of its own.

Dynamo changes how a process runs all Python functions: other tests of the process would see it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import SCRIPT_DEADLINE

CASES = Path(__file__).with_name("torch_compile_cases.py")


@pytest.mark.system
def test_compiled_code_uses_zrpc_and_can_be_sent() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(CASES)],
        capture_output=True,
        text=True,
        timeout=SCRIPT_DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
