"""Gradients of tensors on devices, in processes of their own.

torch makes the threads of backward passes before the first one of a process, and must know the
device by then.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.own_process import passes_in_its_own_process
from tests.support.warm import warm_commands

pytestmark = pytest.mark.system


def test_gradients_of_tensors_on_devices() -> None:
    passes_in_its_own_process(Path(__file__).with_name("devices_cases.py"))


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch can't pretend an accelerator",
)
def test_a_pass_goes_on_while_an_accelerator_computes() -> None:
    """No thread waits for another worker before it has run what the accelerator has made ready.

    Nor without limit, if a node has failed meanwhile.
    """
    found = subprocess.run(
        [warm_commands().python, "-m", "tests.services.autograd.accelerator_program"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    expected = [str([8 * 10.0**3] * 3), "not without limit"]
    assert found.stdout.splitlines() == expected, found.stdout + found.stderr
