from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support.waiting import until
from zrpc.launch.console import Console
from zrpc.launch.output import Output, last_traceback

TRACE = b"Traceback (most recent call last):"


def test_last_traceback_leaves_out_what_came_before() -> None:
    lines = [b"noise", TRACE, b"  old", b"E: 1", b"noise", TRACE, b"  new", b"E: 2", b"bye"]
    assert last_traceback(lines) == lines[5:]


def test_last_traceback_keeps_the_whole_chain() -> None:
    cause = b"The above exception was the direct cause of the following exception:"
    context = b"During handling of the above exception, another exception occurred:"
    chain = [TRACE, b"E: 1", b"", cause, b"", TRACE, b"E: 2", b"", context, b"", TRACE, b"E: 3"]
    assert last_traceback([TRACE, b"E: 0", b"x", *chain]) == chain


def test_without_a_traceback_the_last_lines_are_kept() -> None:
    lines = [b"%d" % i for i in range(50)]
    assert last_traceback(lines) == lines[-20:]


def test_full_disk_does_not_stop_the_output(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    (tmp_path / "rank0.out").symlink_to("/dev/full")
    output = Output(Console(stdout=writing, stderr=writing), tmp_path)
    for fd in output.open(0):
        os.write(fd, b"text\n")
        os.close(fd)
    assert output.drain(10.0)
    os.close(writing)
    with open(reading, "rb") as file:
        shown = file.read()
    assert shown.count(b"[0] text\n") == 2
    assert b"rank0.out: [Errno 28] No space left on device; no longer kept" in shown
    assert (tmp_path / "rank0.err").read_bytes() == b"text\n"


def test_log_that_another_program_has_emptied_goes_on_at_its_start(tmp_path: Path) -> None:
    """As logrotate's copytruncate does."""
    null = os.open(os.devnull, os.O_WRONLY)
    (tmp_path / "rank0.out").write_bytes(b"of an earlier launch\n")
    output = Output(Console(stdout=null, stderr=null), tmp_path)
    out, err = output.open(0)
    log = tmp_path / "rank0.out"
    os.write(out, b"first\n")
    until(lambda: log.read_bytes() == b"first\n", "the first line is kept")
    os.truncate(log, 0)
    os.write(out, b"second\n")
    for fd in (out, err):
        os.close(fd)
    assert output.drain(10.0)
    assert log.read_bytes() == b"second\n"
    os.close(null)


@pytest.mark.system
def test_last_state_of_a_bar_is_shown_while_its_worker_is_silent() -> None:
    reading, writing = os.pipe()
    output = Output(Console(stdout=writing, stderr=writing))
    out, err = output.open(3)
    os.write(out, b"\r10%\r100%")
    with open(reading, "rb") as shown:
        assert [shown.readline(), shown.readline()] == [b"[3] 10%\n", b"[3] 100%\n"]
        for fd in (out, err):
            os.close(fd)
        assert output.drain(10.0)
        os.close(writing)
        assert shown.read() == b""


def test_report_of_a_failure_has_limited_memory_for_long_lines() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    output = Output(Console(stdout=null, stderr=null))
    out, err = output.open(0)
    for _ in range(4):
        os.write(err, b"x" * (1 << 20) + b"\n")
    for fd in (out, err):
        os.close(fd)
    assert output.drain(10.0)
    assert [len(line) for line in output.error_tail(0)] == [1 << 20]
    os.close(null)


def test_waiting_for_an_open_stream_has_a_timeout() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    output = Output(Console(stdout=null, stderr=null))
    fds = output.open(0)
    assert not output.drain(0.05)
    for fd in fds:
        os.close(fd)
    assert output.drain(10.0)
    os.close(null)


def test_streams_that_others_hold_open_end_once_they_are_empty(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    output = Output(Console(stdout=writing, stderr=writing), tmp_path)
    fds = output.open(0)
    for fd in fds:
        os.write(fd, b"whole\npart")
    output.finish()
    assert output.drain(30.0)
    os.close(writing)
    with open(reading, "rb") as file:
        assert sorted(file.read().splitlines()) == [b"[0] part"] * 2 + [b"[0] whole"] * 2
    for fd in fds:
        os.close(fd)


@pytest.mark.system
def test_drain_waits_for_a_slow_reader_until_it_is_cancelled() -> None:
    reading, writing = os.pipe()
    output = Output(Console(stdout=writing, stderr=writing))
    out, err = output.open(0)
    os.close(err)
    feeder = threading.Thread(
        target=lambda: (os.write(out, b"x\n" * 100_000), os.close(out)), daemon=True
    )
    feeder.start()
    asked: list[int] = []
    assert not output.drain(1.0, cancelled=lambda: asked.append(1) or len(asked) > 30)
    assert len(asked) == 31  # that took longer than the timeout for open streams
    total = 0
    while total < 600_000:
        total += len(os.read(reading, 65536))
    assert output.drain(10.0)
    feeder.join()
    os.close(reading)
    os.close(writing)


def test_console_reports_once_that_its_reader_is_gone() -> None:
    reading, writing = os.pipe()
    calls: list[int] = []
    console = Console(stdout=writing, stderr=writing, on_closed=lambda: calls.append(1))
    os.close(reading)
    for _ in range(3):
        console.show(0, [b"lost"], error=False)
    assert console.closed
    assert calls == [1]
    os.close(writing)


def test_lines_stay_whole_when_the_reader_is_slow() -> None:
    reading, writing = os.pipe()
    console = Console(stdout=writing, stderr=writing)
    lines = [[b"%d" % rank * 999] * 200 for rank in range(4)]  # more than a pipe holds at once
    writers = [
        threading.Thread(target=console.show, args=(rank, lines[rank]), kwargs={"error": False})
        for rank in range(4)
    ]
    for writer in writers:
        writer.start()
    expected = sorted(b"[%d] %s" % (rank, line) for rank in range(4) for line in lines[rank])
    size = sum(len(line) + 1 for line in expected)
    shown = b""
    while len(shown) < size:
        shown += os.read(reading, 1000)
    for writer in writers:
        writer.join()
    assert sorted(shown.splitlines()) == expected
    os.close(reading)
    os.close(writing)
