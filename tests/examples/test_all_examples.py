"""Every example is on the page of examples, has a help text, and reports what it lacks."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish, shown

SCRIPTS = {script.stem: script for script in EXAMPLES.glob("*.py")}


def test_the_page_shows_every_example_with_the_command_of_its_docstring() -> None:
    assert sorted(shown()) == sorted(SCRIPTS)
    for name, (command, lines) in shown().items():
        docstring = ast.get_docstring(ast.parse(SCRIPTS[name].read_text())) or ""
        documented = [line.strip() for line in docstring.splitlines()]
        assert any(line == command or line.startswith(f"{command} --") for line in documented)
        assert lines, name


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_example_has_a_help_text(commands: Commands, name: str) -> None:
    outcome = finish(commands.start(SCRIPTS[name], "--help"))
    assert outcome.returncode == 0, outcome
    assert outcome.stdout.startswith("usage:")


JUDGE = ("--controller", "judge")


@pytest.mark.parametrize(
    ("name", "workers", "options", "text"),
    [
        ("coordinator", 2, (), "expected at least 5 workers, but got 2"),
        ("ddp_remote_embedding", 2, (), "expected 4 workers, but got 2"),
        ("distributed_rnn", 3, (), "expected 2 workers, but got 3"),
        ("mixture_of_experts", 2, (), "expected at least 3 workers"),
        ("pipeline_parallel", 3, (), "expected 4 workers, but got 3"),
        ("worker_group", 2, (), "expected at least 3 workers, but got 2"),
        ("worker_group", 3, JUDGE, "of trainer0, trainer1, generator0, but got judge"),
    ],
)
def test_wrong_workers_are_refused(
    run_first: Callable[..., Outcome], name: str, workers: int, options: tuple[str, ...], text: str
) -> None:
    outcome = run_first(workers, SCRIPTS[name], *options)
    assert outcome.returncode == 2, outcome
    assert text in outcome.stderr


@pytest.mark.parametrize(
    ("name", "workers", "limit", "text"),
    [
        ("batch_rpc", 2, ("--steps", "5"), "Expected an accuracy of at least 90%"),
        ("parameter_server", 2, ("--steps", "1"), "Expected an accuracy of at least 50%"),
        ("async_parameter_server", 3, ("--max-updates", "100"), "Not below 0.003 after 100"),
        ("worker_group", 3, ("--steps", "2"), "Expected a reward of at least 0.7"),
        ("reinforce_cartpole", 4, ("--max-episodes", "9"), " of 475 after 9 episodes"),
    ],
)
def test_an_example_that_learned_too_little_fails(
    run_plainly: Callable[..., list[Outcome]],
    name: str,
    workers: int,
    limit: tuple[str, str],
    text: str,
) -> None:
    outcome = run_plainly(workers, SCRIPTS[name], *limit)[0]
    assert outcome.returncode == 1, outcome
    assert text in outcome.stderr
    assert "Traceback" not in outcome.stderr
