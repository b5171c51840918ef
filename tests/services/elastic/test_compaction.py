"""How far back the log of a mesh reaches."""

from __future__ import annotations

import pytest

from zrpc.services.elastic.compaction import LogBounds


def test_which_member_writes_a_snapshot_and_when() -> None:
    bounds = LogBounds(1, 0, 0, 100)
    due = [line for line in range(4) if bounds.due(137, 2, line)]
    assert due == [0, 1]
    assert not bounds.due(137, 10, 0)  # the more members, the longer


def test_bounds_as_text() -> None:
    bounds = LogBounds(3, 10, 20, 20)
    assert LogBounds.parse(bounds.dump()) == bounds
    for text in (
        *("", "[]", "1", "{}", "[" * 10_000, "[1, 0, 0]", "[1, 0, 0, 1.5]", "[1, 0, 0, true]"),
        *("[0, 0, 0, 0]", "[1, 2, 1, 3]", "[1, -1, 1, 3]"),
    ):
        with pytest.raises(ValueError, match="expected the bounds"):
            LogBounds.parse(text)
