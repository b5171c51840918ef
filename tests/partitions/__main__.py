"""Runs random faults over three hosts, which are network namespaces of this machine.

python -m tests.partitions --minutes 10
python -m tests.partitions --seed 5 --round 3    # one round again
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter

from tests.partitions.plan import draw
from tests.partitions.rounds import hosts, run_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long; default: 5")
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--round", type=int, help="run only the round of this number")
    parser.add_argument(
        "--megabytes", type=int, default=16, help="the size of the largest tensors; default: 16"
    )
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    end = time.monotonic() + 60 * options.minutes
    number, failed = options.round or 0, 0
    counts: Counter[str] = Counter()
    with hosts() as where:
        while True:
            plan = draw(seed, number, options.megabytes * 10**6)
            began = time.monotonic()
            outcome = run_round(plan, where)
            counts += outcome.counts
            failed += bool(outcome.wrong)
            print(
                f"round {number}, at {plan.moment}: {plan.fault}, {plan.victim} of {plan.hosts}; "
                f"{time.monotonic() - began:.0f} s, {sum(outcome.counts.values())} actions, "
                f"{outcome.counts['cut off']} cut off",
                *outcome.wrong,
                sep="\n  ",
                flush=True,
            )
            number += 1
            if options.round is not None or time.monotonic() > end:
                break
    print(f"{number} rounds, {failed} with problems; {dict(counts)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
