from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import SOON, until
from zrpc.launch.output import Console, Output, last_traceback
from zrpc.runtime.resource_limits import allow_descriptors

TRACE = b"Traceback (most recent call last):"


@pytest.fixture
def shown() -> Iterator[tuple[int, int]]:
    """A pipe for what is shown; closes what is left of it."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0), open(writing, "wb", buffering=0):
        yield reading, writing


class Worker:
    """The output of one worker, which is shown in a pipe and perhaps kept in a directory."""

    def __init__(self, writing: int, rank: int = 0, log_dir: Path | None = None) -> None:
        self.output = Output(Console(stdout=writing, stderr=writing), log_dir)
        self.opened = self.output.open(rank)
        self.out, self.err = self.opened.__enter__()

    def exit(self) -> None:
        self.opened.__exit__(None, None, None)
        assert self.output.drain(10.0)


def test_the_last_traceback_is_kept_with_its_whole_chain_or_else_the_last_lines() -> None:
    cause = b"The above exception was the direct cause of the following exception:"
    context = b"During handling of the above exception, another exception occurred:"
    chain = [TRACE, b"E: 1", b"", cause, b"", TRACE, b"E: 2", b"", context, b"", TRACE, b"E: 3"]
    assert last_traceback([b"noise", TRACE, b"  old", b"E: 0", b"x", *chain]) == chain
    lines = [b"%d" % i for i in range(50)]
    assert last_traceback(lines) == lines[-20:]


def test_full_disk_does_not_stop_the_output(shown: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "rank0.out").symlink_to("/dev/full")
    worker = Worker(shown[1], log_dir=tmp_path)
    for fd in (worker.out, worker.err):
        os.write(fd, b"text\n")
    worker.exit()
    text = os.read(shown[0], 4096)
    assert text.count(b"[0] text\n") == 2
    assert b"rank0.out: [Errno 28] No space left on device; no longer kept" in text
    assert (tmp_path / "rank0.err").read_bytes() == b"text\n"


def test_an_emptied_log_goes_on_at_its_start(shown: tuple[int, int], tmp_path: Path) -> None:
    """As logrotate's copytruncate does."""
    log = tmp_path / "rank0.out"
    for old in ("rank0.out", "rank0.1.out", "rank0.12.err"):
        (tmp_path / old).write_bytes(b"of an earlier launch\n")
    worker = Worker(shown[1], log_dir=tmp_path)
    os.write(worker.out, b"first\n")
    until(lambda: log.read_bytes() == b"first\n", "the first line is kept")
    os.truncate(log, 0)
    os.write(worker.out, b"second\r\n")
    worker.exit()
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert kept == {"rank0.out": b"second\r\n", "rank0.err": b""}


@pytest.mark.system
def test_last_state_of_a_bar_is_shown_while_its_worker_is_silent(shown: tuple[int, int]) -> None:
    worker = Worker(shown[1], rank=3)
    os.write(worker.out, b"\r10%\r100%")
    assert [os.read(shown[0], 99) for _ in range(2)] == [b"[3] 10%\n", b"[3] 100%\n"]
    worker.exit()


def test_report_of_a_failure_keeps_a_limited_part_of_long_lines(shown: tuple[int, int]) -> None:
    with open(os.devnull, "wb") as null:
        worker = Worker(null.fileno())
        for _ in range(4):
            os.write(worker.err, b"x" * (1 << 20) + b"\n")
        worker.exit()
    assert [len(line) for line in worker.output.error_tail(0)] == [1 << 20]


def test_streams_that_others_hold_open_end_once_they_are_empty(shown: tuple[int, int]) -> None:
    worker = Worker(shown[1])
    for fd in (worker.out, worker.err):
        os.write(fd, b"whole\npart")
    assert worker.output.drain(30.0)
    assert sorted(os.read(shown[0], 4096).splitlines()) == [b"[0] part"] * 2 + [b"[0] whole"] * 2
    worker.exit()


def test_the_wait_for_streams_has_a_timeout(shown: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "rank0.out").symlink_to(f"/proc/self/fd/{shown[1]}")  # full after 64 KiB
    with open(os.devnull, "wb") as null:
        worker = Worker(null.fileno(), log_dir=tmp_path)
        for size in (1 << 16, 1):
            os.write(worker.out, b"x" * size)
        assert not worker.output.drain(0.1)
        os.read(shown[0], 1 << 16)
        worker.exit()


def test_notices_wait_for_no_reader(shown: tuple[int, int]) -> None:
    os.set_blocking(shown[1], False)
    full = os.write(shown[1], b"x" * (1 << 20))
    os.set_blocking(shown[1], True)
    worker = Worker(shown[1])
    for number in range(200):
        worker.output.notice(f"notice {number} of \udc80")
    while full > 0:
        full -= len(os.read(shown[0], full))
    worker.exit()
    lines = os.read(shown[0], 1 << 16).splitlines()
    assert lines == [b"notice %d of \\udc80" % number for number in range(200)]


@pytest.mark.system
def test_drain_waits_for_a_slow_reader_until_it_is_cancelled(shown: tuple[int, int]) -> None:
    worker = Worker(shown[1])
    os.write(worker.out, b"x\n" * 30_000)  # three times as much is shown, and the pipe holds 64 KiB
    asked: list[int] = []
    assert not worker.output.drain(1.0, cancelled=lambda: asked.append(1) or len(asked) > 30)
    assert len(asked) == 31  # that took longer than the timeout for open streams
    total = 0
    while total < 180_000:
        total += len(os.read(shown[0], 65536))
    worker.exit()


def test_lines_stay_whole_for_a_slow_reader_of_a_high_descriptor(shown: tuple[int, int]) -> None:
    """Another process has made it non-blocking; a launch of 500 workers has more than 1,024."""
    assert allow_descriptors(2000) is None
    high = fcntl.fcntl(shown[1], fcntl.F_DUPFD_CLOEXEC, 1500)
    os.set_blocking(high, False)
    console = Console(stdout=high, stderr=high)
    lines = [[b"%d" % rank * 999] * 200 for rank in range(4)]  # more than a pipe holds at once
    writers = [
        threading.Thread(target=console.show, args=(rank, lines[rank]), kwargs={"error": False})
        for rank in range(4)
    ]
    for writer in writers:
        writer.start()
    until(lambda: console.blocked)
    expected = sorted(b"[%d] %s" % (rank, line) for rank in range(4) for line in lines[rank])
    text = b""
    while len(text) < sum(len(line) + 1 for line in expected):
        text += os.read(shown[0], 1000)
    for writer in writers:
        writer.join(SOON)
    os.close(high)
    assert sorted(text.splitlines()) == expected
