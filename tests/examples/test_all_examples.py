"""Every example is on the page of examples, has a help text, and reports what it lacks."""

from __future__ import annotations

import ast

import pytest

from tests.examples.example_commands import EXAMPLES, Commands, RunPlainly, finish, shown

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


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_example_says_how_to_launch_it(commands: Commands, name: str) -> None:
    outcome = finish(commands.start(SCRIPTS[name]))
    assert outcome.returncode == 2, outcome
    assert ": use zrpc launch" in outcome.stderr


@pytest.mark.parametrize(
    ("name", "workers", "options", "code", "text"),
    [
        ("coordinator", 2, "", 2, "expected at least 5 workers, but got 2"),
        ("ddp_remote_embedding", 2, "", 2, "expected 4 workers, but got 2"),
        ("distributed_rnn", 3, "", 2, "expected 2 workers, but got 3"),
        ("mixture_of_experts", 2, "", 2, "expected at least 3 workers"),
        ("pipeline_parallel", 3, "", 2, "expected 4 workers, but got 3"),
        ("worker_group", 2, "", 2, "expected at least 3 workers, got 2"),
        ("worker_group", 3, "--controller judge", 2, "trainer1, generator0, but got judge"),
        ("batch_rpc", 2, "--steps 5", 1, "Expected an accuracy of at least 90%"),
        ("parameter_server", 2, "--steps 1", 1, "Expected an accuracy of at least 50%"),
        ("async_parameter_server", 3, "--max-updates 100", 1, "Not below 0.003 after 100"),
        ("worker_group", 3, "--steps 2", 1, "Expected a reward of at least 0.7"),
        ("reinforce_cartpole", 4, "--max-episodes 9", 1, " of 475 after 9 episodes"),
    ],
)
def test_an_example_refuses_wrong_workers_and_fails_if_it_learned_too_little(
    run_plainly: RunPlainly, name: str, workers: int, options: str, code: int, text: str
) -> None:
    started = 1 if code == 2 else workers  # what is wrong is known before the others are there
    outcome = run_plainly(workers, SCRIPTS[name], *options.split(), started=started)[0]
    assert outcome.returncode == code, outcome
    assert text in outcome.stderr
    assert "Traceback" not in outcome.stderr
