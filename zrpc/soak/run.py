"""A run of the soak test: one mesh after the other, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from zrpc.soak.life import live
from zrpc.soak.plan import Life, plan
from zrpc.soak.record import Record
from zrpc.testing.startup import warm_up

__all__ = ["run"]

# What each worker would import else, for seconds: the soak test, and what optimizers need.
_PRELOAD = ("torch._dynamo", "zrpc.soak.shift")


def run(record: Record, seconds: float, tell: Callable[[str], None]) -> None:
    """Runs until the time is over, or something went wrong; at least one mesh lives.

    Args:
        record: says which seed and how many workers, and becomes the result; complete also
            where Ctrl-C cuts the run off.
        seconds: for how long, about.
        tell: called with what is being done, now and then.

    Raises:
        LaunchError: processes can't be started at all.
    """
    warm_up(processes=True, preload=_PRELOAD)
    number = 0
    while not record.tally.violations:
        left = seconds - (time.monotonic() - record.began)
        life = plan(record.seed, number, record.workers, left)
        if number and left < life.length:
            break
        live(life, record.workers, record, partial(_tell, life, tell))
        number += 1


def _tell(life: Life, tell: Callable[[str], None], what: str) -> None:
    tell(f"{'elastic ' if life.elastic else ''}mesh {life.name}, {life.way}: {what}")
