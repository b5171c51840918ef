"""The page of examples shows all of them, with the commands that their docstrings name."""

from __future__ import annotations

import ast

import pytest

from tests.examples.example_commands import EXAMPLES, not_printed, shown

SCRIPTS = {script.stem: script for script in EXAMPLES.glob("*.py")}


def test_the_page_shows_every_example() -> None:
    assert sorted(shown()) == sorted(SCRIPTS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_page_shows_the_command_of_the_docstring(name: str) -> None:
    command, lines = shown()[name]
    docstring = ast.get_docstring(ast.parse(SCRIPTS[name].read_text())) or ""
    documented = [line.strip() for line in docstring.splitlines()]
    assert any(line == command or line.startswith(f"{command} --") for line in documented)
    assert lines


def test_lines_are_compared_except_for_their_numbers() -> None:
    output = "[0] step   10   loss 3.747\n[1] trainer2: 20 steps of 7.9 ms"
    assert (
        not_printed(["[0] step  150   loss 2.1e-05", "[1] trainer2: 3 steps of 1 ms"], output) == []
    )
    changed = [
        "[0] step 10 lost 3.747",
        "[1] step 10 loss 3.747",
        "[1] trainer3: 20 steps of 7.9 ms",
    ]
    assert not_printed(changed, output) == changed
