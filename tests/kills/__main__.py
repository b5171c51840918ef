"""Runs random work on one host, and kills, stops or interrupts a worker in each round.

python -m tests.kills --minutes 10
python -m tests.kills --seed 5 --round 3    # one round again
"""

from __future__ import annotations

from tests.kills.plan import draw
from tests.kills.rounds import run_round
from tests.support.fault_rounds import parser, run_rounds

if __name__ == "__main__":
    run_rounds(parser(str(__doc__)).parse_args(), draw, run_round)
