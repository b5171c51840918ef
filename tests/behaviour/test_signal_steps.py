"""Signal handlers call and raise at any step, in a process of its own.

If one raises between the last two steps of a part, that part may stay begun in its process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_process import passes_in_its_own_process


@pytest.mark.system
def test_signal_handlers_call_and_raise_at_any_step() -> None:
    passes_in_its_own_process(Path(__file__).with_name("signal_steps_cases.py"))
