"""Every example has a help text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.example_commands import EXAMPLES, Commands, finish

SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_example_has_a_help_text(commands: Commands, script: Path) -> None:
    outcome = finish(commands.start(script, "--help"))
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("usage:")
