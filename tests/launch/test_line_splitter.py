from __future__ import annotations

import random

import pytest

from zrpc.launch.line_splitter import LineSplitter


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
    ],
)
def test_lines_of_output_that_arrives_at_once(data: bytes, lines: list[bytes]) -> None:
    splitter = LineSplitter()
    assert splitter.feed(data, now=0.0) + splitter.finish() == lines


def test_lines_do_not_depend_on_how_the_bytes_arrive() -> None:
    chance = random.Random(1)
    data = b"one\r\ntwo\n\nthree \xe2\x82\xac\r\nfour"
    for _ in range(200):
        cuts = sorted(chance.choices(range(len(data) + 1), k=5))
        splitter = LineSplitter()
        got: list[bytes] = []
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            got += splitter.feed(data[start:end], now=0.0)
        assert got + splitter.finish() == [b"one", b"two", b"", b"three \xe2\x82\xac", b"four"]


def test_progress_bar_is_shown_once_a_second_and_at_its_end() -> None:
    splitter = LineSplitter()
    got = []
    for percent in range(100):
        got += splitter.feed(b"\r%d%%" % percent, now=percent / 25)
    got += splitter.feed(b"\r100%\n", now=4.0)
    assert got == [b"0%", b"25%", b"50%", b"75%", b"100%"]


def test_endless_line_is_shown_in_pieces() -> None:
    splitter = LineSplitter()
    got = []
    for _ in range(40):
        got += splitter.feed(b"x" * 65536, now=0.0)
    got += splitter.finish()
    assert len(got) > 1
    assert sum(map(len, got)) == 40 * 65536
