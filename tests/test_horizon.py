"""How far back the news of a mesh go."""

from __future__ import annotations

import pytest

from zrpc.horizon import Horizon


def test_what_is_deleted_lags_two_summaries_behind():
    horizon = Horizon()
    seen = []
    for base in (40, 90, 150, 200):
        seen.append(list(horizon.dead))
        horizon = horizon.moved(base)
    assert horizon == Horizon(4, 90, 150, 200)
    assert seen == [[], [], list(range(40)), list(range(40, 90))]


def test_who_writes_a_summary_and_when():
    horizon = Horizon(1, 0, 0, 100)
    due = [line for line in range(4) if horizon.due(137, 2, line)]
    assert due == [0, 1]
    assert not horizon.due(137, 10, 0)  # the more members, the longer


def test_a_horizon_as_text():
    horizon = Horizon(3, 10, 20, 20)
    assert Horizon.parse(horizon.dump()) == horizon


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "1", "{}", "[" * 10_000, "[1, 0, 0]", "[1, 0, 0, 1.5]", "[1, 0, 0, true]"),
        *("[0, 0, 0, 0]", "[1, 2, 1, 3]", "[1, -1, 1, 3]"),
    ],
)
def test_a_text_that_is_no_horizon(text):
    with pytest.raises(ValueError, match="expected the horizon"):
        Horizon.parse(text)
