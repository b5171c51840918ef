"""Every example has a help text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.example_commands import DEADLINE, EXAMPLES, Scripts

SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_example_has_a_help_text(scripts: Scripts, script: Path) -> None:
    scripts.start(script, "--help")
    [outcome] = scripts.finish(DEADLINE)
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("usage:")
