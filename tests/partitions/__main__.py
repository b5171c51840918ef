"""Runs random faults over three hosts, which are network namespaces of this machine.

python -m tests.partitions --minutes 10
python -m tests.partitions --seed 5 --round 3    # one round again
"""

from __future__ import annotations

from functools import partial

from tests.partitions.plan import draw
from tests.partitions.rounds import hosts, run_round
from tests.support.fault_rounds import parser, run_rounds

if __name__ == "__main__":
    made = parser(str(__doc__))
    made.add_argument(
        "--megabytes", type=int, default=16, help="the size of the largest tensors; default: 16"
    )
    options = made.parse_args()
    with hosts() as where:
        run_rounds(
            options,
            partial(draw, transfer_bytes=options.megabytes * 10**6),
            partial(run_round, where=where),
        )
