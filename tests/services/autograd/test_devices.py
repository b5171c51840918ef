"""Gradients of tensors on devices.

torch makes the threads of backward passes before the first one of a process, and must know the
device by then.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_process import passes_in_its_own_process


@pytest.mark.system
def test_gradients_of_tensors_on_devices() -> None:
    passes_in_its_own_process(Path(__file__).with_name("devices_cases.py"))
