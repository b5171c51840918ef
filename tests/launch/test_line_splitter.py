from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.launch.line_splitter import LineSplitter, ThrottledSplitter


@pytest.mark.system
def test_line_is_whole_up_to_16_mib_and_a_longer_one_is_shown_in_pieces() -> None:
    splitter = LineSplitter()
    line = b"x" * (16 << 20)
    assert splitter.feed(line, now=0.0) == []
    assert splitter.feed(b"\n", now=0.0) == [line]
    got = [piece for _ in range(5) for piece in splitter.feed(b"x" * (4 << 20), now=0.0)]
    assert [len(piece) for piece in got + splitter.finish()] == [16 << 20, 4 << 20]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\r10%\r20%\r100%\nend\n", [b"100%", b"end"]),
        (b"10%\r20%\r\n", [b"20%"]),
        (b"50%\r   \r\n", [b"50%"]),
        (b"\xff\xfe\x00\n", [b"\xff\xfe\x00"]),
        (b"left\r", [b"left"]),
        (b"\r", []),
        (b"one\r\n\nthree \xe2\x82\xac\r\n", [b"one", b"", b"three \xe2\x82\xac"]),
        (b"\x1b[1;31mred\x1b[0m \x1b[38:5:4mblue\n", [b"\x1b[1;31mred\x1b[0m \x1b[38:5:4mblue"]),
        (b"a\x1b[Kb\x1b[?25lc\x1b[>4;2md\x1b(Be\x1b7f\n", [b"abcdef"]),
        (b"\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", [b"textlink"]),
        (b"\x1b]an unfinished title\nnext\n", [b"", b"next"]),
        (b"\x1bPq#0~~\x1b\\text\n", [b"text"]),
        (b"1%\x1b[1G2%\x1b[2K\x1b[0G3%\n", [b"3%"]),
        (b"at 1%\b\b2%\b\b3%\n", [b"at 3%"]),
        (b"\xe2\x82\xac1\x1b[2D2\n", [b"2"]),
        (b"a\x1b[3Cb\n", [b"a   b"]),
        (b"\x1b[2J\x1b[Ha\nb\n\x1b[H\x1b[2Jc\nd\n", [b"a", b"b", b"c", b"d"]),
        (b"a\x1b[5;1Hb\x1b[9;1Hc", [b"a", b"b", b"c"]),
        (b"\x1b7\x1b[40;0HProgress: [10%]\x1b8Unpacking\n", [b"Progress: [10%]", b"Unpacking"]),
        (b"a\x0e\x0f\x0b\x0cb\t\x07c\n", [b"ab\t\x07c"]),
        (b"text\x1b[", [b"text"]),
        (b"text\x1b", [b"text"]),
        (b"a\x1bEb\x1bDc\n", [b"a", b"b", b"c"]),
        (b"line\n\x1b[%sA\n" % (b"9" * 5000), [b"line"]),
    ],
)
def test_lines_and_colours_are_kept_and_other_control_sequences_followed(
    data: bytes, lines: list[bytes]
) -> None:
    whole = LineSplitter()
    assert whole.feed(data, now=0.0) + whole.finish() == lines
    bytewise = LineSplitter()
    got = [line for byte in data for line in bytewise.feed(bytes([byte]), now=0.0)]
    assert [line for line in got + bytewise.finish() if line in lines] == lines


def test_bars_in_several_rows_are_each_shown_once_a_second_and_at_their_ends() -> None:
    """The control sequences are those of tqdm."""
    splitter = LineSplitter()
    got = []
    for step in range(50):
        got += splitter.feed(b"\rfirst %d\n\rsecond %d\x1b[A" % (step, step), now=step / 25)
    got += splitter.feed(b"\rfirst done\n\rsecond done\n", now=2.0) + splitter.finish()
    assert got[0] == b"first 0"
    for bar in (b"first", b"second"):
        states = [line for line in got if line.startswith(bar)]
        assert len(states) in (3, 4)
        assert states[-1] == bar + b" done"


def test_bars_that_are_drawn_from_their_last_row_are_shown_once_a_second() -> None:
    """The control sequences are those of rich."""
    splitter = LineSplitter()
    got = splitter.feed(b"\x1b[?25la 0\nb 0", now=0.0)
    for step in range(1, 101):
        data = b"\r\x1b[2K\x1b[1A\x1b[2Ka %d\nb %d" % (step, step)
        got += splitter.feed(data, now=step / 50)
    got += splitter.feed(b"\n\x1b[?25hend\n", now=2.0) + splitter.finish()
    assert got[0] == b"a 0"
    assert [line for line in got if line.startswith(b"a")][-1] == b"a 100"
    assert [line for line in got if line.startswith(b"b")][-1] == b"b 100"
    assert got[-1] == b"end"
    assert len(got) < 12


def test_lines_printed_above_a_bar_are_all_shown_in_order() -> None:
    splitter = LineSplitter()
    got = splitter.feed(b"bar\n", now=0.0)
    for number in range(500):
        data = b"\x1b[1A\x1b[2Kline %d\nbar %d\n" % (number, number)
        got += splitter.feed(data, now=number / 100)
    got += splitter.finish()
    assert [x for x in got if x[:4] == b"line"] == [b"line %d" % n for n in range(500)]
    assert got[-1] == b"bar 499"


def test_last_state_of_a_bar_is_shown_although_nothing_follows() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r1%", now=0.0) == []
    assert splitter.feed(b"\r2%", now=0.1) == [b"1%"]
    assert splitter.feed(b"\r3%", now=0.2) == []
    assert splitter.due == pytest.approx(1.1)
    assert splitter.tick(now=1.1) == [b"3%"]
    assert splitter.due is None
    assert splitter.feed(b"\n", now=5.0) + splitter.finish() == []


def test_state_that_ends_with_a_return_is_shown_although_nothing_follows() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"1%\r", now=0.0) == []
    assert splitter.due is not None
    assert splitter.tick(now=splitter.due) == [b"1%"]
    assert splitter.feed(b"2%\r", now=5.0) + splitter.finish() == [b"2%"]


def test_unfinished_line_that_is_not_rewritten_waits_for_its_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"(Pdb) ", now=0.0) == []
    assert splitter.due is None
    assert splitter.feed(b"c\n", now=9.0) == [b"(Pdb) c"]


@pytest.mark.system
def test_rows_of_a_bar_use_limited_memory() -> None:
    splitter = LineSplitter()
    shown = 0
    for _ in range(6):
        for line in splitter.feed(b"x" * (4 << 20) + b"\x1b[1Ay\x1b[5B", now=0.0):
            shown += len(line)
    assert shown >= 8 << 20


def test_lines_above_the_limit_are_counted_when_the_second_is_over() -> None:
    splitter = ThrottledSplitter(max_lines=2, max_bytes=100)
    assert splitter.feed(b"1\n2\n3\n", now=0.0) == [b"1", b"2"]
    assert splitter.due == 1.0
    assert splitter.feed(b"4\n", now=0.9) == []
    assert splitter.tick(now=1.0) == [b"... 2 lines left out"]
    assert splitter.due is None
    assert splitter.feed(b"5\n", now=1.1) == [b"5"]
    # A line that is longer than the limit passes alone; an unfinished one comes after the count.
    splitter = ThrottledSplitter(max_lines=5, max_bytes=3)
    assert splitter.feed(b"long line\nx\nError: the", now=0.0) == [b"long line"]
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
