"""What holds for every example."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_commands import EXAMPLES, Commands, finish

SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help(commands: Commands, script: Path) -> None:
    outcome = finish(commands.start(script, "--help"))
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("usage:")
