"""Runs rounds with random faults for a while: the command line of the long tests."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Outcome", "agree", "parser", "run_rounds"]


@dataclass
class Outcome:
    """What a round has found: what was wrong, and how often each action was performed."""

    plan: Any
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def agree(found: Mapping[int, list[int]]) -> bool:
    """Returns whether workers that count each other have the same members, given those of each."""
    return all(found.get(other, each) == each for each in found.values() for other in each)


class Draw(Protocol):
    """Returns the plan of a round, whose text describes it."""

    def __call__(self, seed: int, number: int) -> Any: ...


def parser(doc: str) -> argparse.ArgumentParser:
    """Returns a parser of the options that all long tests have.

    Args:
        doc: the docstring of the command.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--minutes", type=float, default=5.0, help="how long; default: 5")
    made.add_argument("--seed", type=int, help="default: a random one")
    made.add_argument("--round", type=int, help="run only the round of this number")
    return made


def run_rounds(
    options: argparse.Namespace, draw: Draw, run_round: Callable[[Any], Outcome]
) -> None:
    """Runs one round after the other, prints a line for each, and exits."""
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    end = time.monotonic() + 60 * options.minutes
    first = number = options.round or 0
    failed = 0
    counts: Counter[str] = Counter()
    while number == first or (options.round is None and time.monotonic() < end):
        plan = draw(seed, number)
        began = time.monotonic()
        outcome = run_round(plan)
        counts += outcome.counts
        failed += bool(outcome.wrong)
        print(
            f"round {number}, {plan}; {time.monotonic() - began:.0f} s, "
            f"{sum(outcome.counts.values())} actions, {outcome.counts['cut off']} cut off",
            *outcome.wrong,
            sep="\n  ",
            flush=True,
        )
        number += 1
    print(f"{number - first} rounds, {failed} with problems; {dict(counts)}")
    sys.exit(bool(failed))
