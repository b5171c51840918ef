"""Clocks that differ, aligned by the messages between their workers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.services.tracing.clock import Clocks

SLACK = 1e-6  # of floating point
clocks_ahead = st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=5)
delays = st.floats(1e-6, 1.0)


@st.composite
def exchanges(draw: Any) -> Any:
    """Clocks, and exchanges between their workers: caller, callee and four times."""
    ahead = draw(clocks_ahead)
    workers = st.integers(0, len(ahead) - 1)
    found = []
    for _ in range(draw(st.integers(1, 20))):
        caller, callee = draw(workers), draw(workers)
        sent = draw(st.floats(0, 1e4))
        received = sent + draw(delays)
        answered = received + draw(delays)
        returned = answered + draw(delays)
        mine, others = ahead[caller], ahead[callee]
        times = (sent + mine, received + others, answered + others, returned + mine)
        found.append((caller, callee, times))
    return ahead, found


@pytest.mark.system
@given(exchanges())
def test_clocks_are_no_farther_off_than_their_errors(drawn: Any) -> None:
    ahead, found = drawn
    clocks = Clocks()
    for caller, callee, times in found:
        clocks.add(caller, callee, *times)
    for worker, offset in clocks.offsets(0).items():
        assert abs(offset.seconds - (ahead[worker] - ahead[0])) <= offset.error + SLACK
    # By the clocks of two workers that have called each other, if no others are considered.
    clocks, pair = Clocks(), [each for each in found if {*each[:2]} == {0, 1}]
    for caller, callee, times in pair:
        clocks.add(caller, callee, *times)
    offsets = {0: 0.0, **{worker: each.seconds for worker, each in clocks.offsets(0).items()}}
    for caller, callee, (sent, received, answered, returned) in pair:
        assert sent - offsets[caller] <= received - offsets[callee] + SLACK
        assert answered - offsets[callee] <= returned - offsets[caller] + SLACK


def test_equal_clocks_are_found_equal_however_long_messages_take() -> None:
    clocks = Clocks()
    clocks.add(0, 1, 10.0, 10.9, 11.0, 11.1)
    assert clocks.offsets(0)[1].seconds == 0.0


def test_workers_that_have_not_called_each_other_are_compared_by_way_of_a_third() -> None:
    clocks = Clocks()
    clocks.add(0, 1, 0.0, 100.1, 100.2, 0.3)  # 1 is ahead by 100
    clocks.add(2, 1, 50.0, 100.1, 100.2, 50.3)  # 2 is ahead by 50
    found = clocks.offsets(0)
    assert abs(found[2].seconds - 50.0) < 1e-9
    assert abs(found[2].error - 0.2) < 1e-9
    assert 3 not in found


def test_the_fastest_exchange_counts_if_a_clock_has_drifted() -> None:
    clocks = Clocks()
    clocks.add(0, 1, 0.0, 10.01, 10.01, 0.02)  # ahead by 10
    clocks.add(0, 1, 5.0, 15.51, 15.52, 5.04)  # ahead by 10.5
    found = clocks.offsets(0)[1]
    assert abs(found.seconds - 10.0) < 0.011
    assert abs(10.5 - found.seconds) <= found.error + 0.05  # the error has the drift
