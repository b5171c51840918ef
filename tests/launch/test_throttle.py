"""Floods of output: what is shown, and what is counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zrpc.launch.throttle import ThrottledSplitter


def test_lines_above_the_limit_are_counted_when_the_second_is_over() -> None:
    splitter = ThrottledSplitter(max_lines=2, max_bytes=100)
    assert splitter.feed(b"1\n2\n3\n", now=0.0) == [b"1", b"2"]
    assert splitter.due == 1.0
    assert splitter.feed(b"4\n", now=0.9) == []
    assert splitter.tick(now=1.0) == [b"... 2 lines left out"]
    assert splitter.due is None
    assert splitter.feed(b"5\n", now=1.1) == [b"5"]


def test_a_line_that_is_longer_than_the_limit_passes_alone() -> None:
    splitter = ThrottledSplitter(max_lines=5, max_bytes=3)
    assert splitter.feed(b"long line\nx\n", now=0.0) == [b"long line"]
    assert splitter.finish() == [b"... 1 line left out"]


def test_the_unfinished_line_at_the_end_is_shown_after_the_count() -> None:
    splitter = ThrottledSplitter(max_lines=1, max_bytes=100)
    splitter.feed(b"1\n2\nError: the", now=0.0)
    assert splitter.finish() == [b"... 1 line left out", b"Error: the"]


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 0.7))))
def test_each_line_is_shown_or_counted_and_in_order(chunks: list[tuple[int, float]]) -> None:
    splitter = ThrottledSplitter(max_lines=7, max_bytes=50)
    shown, written, now = [], 0, 0.0
    for count, pause in chunks:
        now += pause
        shown += splitter.feed(b"".join(b"%d\n" % (written + i) for i in range(count)), now)
        written += count
    shown += splitter.finish()
    expected = 0
    for line in shown:
        if line.startswith(b"..."):
            expected += int(line.split()[1])
        else:
            assert int(line) == expected
            expected += 1
    assert expected == written
