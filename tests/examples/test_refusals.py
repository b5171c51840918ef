"""Every example has a help text, and reports what it needs and that it has learned too little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish

SCRIPTS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_example_has_a_help_text(commands: Commands, script: Path) -> None:
    outcome = finish(commands.start(script, "--help"))
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("usage:")


@pytest.mark.parametrize(
    ("name", "workers", "text"),
    [
        ("coordinator", 2, "expected at least 5 workers, but got 2"),
        ("ddp_remote_embedding", 2, "expected 4 workers, but got 2"),
        ("distributed_rnn", 3, "expected 2 workers, but got 3"),
        ("mixture_of_experts", 2, "expected at least 3 workers"),
        ("pipeline_parallel", 3, "expected 4 workers, but got 3"),
        ("worker_group", 2, "expected at least 3 workers, but got 2"),
    ],
)
def test_another_number_of_workers_is_refused(
    run_first: Callable[[str, int], Outcome], name: str, workers: int, text: str
) -> None:
    outcome = run_first(name, workers)
    assert outcome.code == 2, outcome
    assert text in outcome.err


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
    outcome = run_plainly(workers, EXAMPLES / f"{name}.py", *limit)[0]
    assert outcome.code == 1, outcome
    assert text in outcome.err
    assert "Traceback" not in outcome.err
