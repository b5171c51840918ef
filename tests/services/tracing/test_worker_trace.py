"""The files in which workers leave what they have recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.waiting import until
from zrpc.calls.recorder import Recording, SpanRecord
from zrpc.services.tracing.worker_trace import ENDED, RUNNING, PartWriter, WorkerTrace

CAPACITY = 10


def describe() -> WorkerTrace:
    return WorkerTrace(3, "w.3", 3, "here", 1, {3: "w.3", 4: "w.4"}, {17: "main", 18: "io"})


def record(recording: Recording, number: int) -> None:
    recording.add(SpanRecord, (f"span {number}", 17, 0, float("inf"), float("inf")))


def names(trace: WorkerTrace) -> list[str]:
    return [each.name for each in trace.records if isinstance(each, SpanRecord)]


@pytest.mark.system
def test_what_is_written_is_read_while_the_worker_runs_and_after(tmp_path: Path) -> None:
    recording = Recording(CAPACITY)
    writer = PartWriter(tmp_path / "new", recording, CAPACITY, describe)
    path = tmp_path / "new" / f"w.3-3{RUNNING}"
    assert WorkerTrace.read(path) == describe()
    assert not path.stat().st_mode & 0o077  # not for other users
    record(recording, 1)
    until(lambda: names(WorkerTrace.read(path)) == ["span 1"])
    record(recording, 2)
    writer.close()
    assert not path.exists()
    assert names(WorkerTrace.read(path.with_suffix(ENDED))) == ["span 1", "span 2"]


@pytest.mark.system
def test_the_files_are_bounded_and_say_how_many_records_were_dropped(tmp_path: Path) -> None:
    recording = Recording(100)
    record(recording, 0)
    writer = PartWriter(tmp_path, recording, CAPACITY, describe)
    path = tmp_path / f"w.3-3{RUNNING}"
    for number in range(1, 50):
        record(recording, number)
        if number % 10 == 9:
            until(lambda: names(WorkerTrace.read(path))[-1] == f"span {number}")  # noqa: B023
    writer.close()
    trace = WorkerTrace.read(path.with_suffix(ENDED))
    assert CAPACITY <= len(trace.records) <= 3 * CAPACITY
    assert names(trace) == [f"span {n}" for n in range(50 - len(trace.records), 50)]
    assert trace.dropped == 50 - len(trace.records)


def test_an_earlier_file_is_replaced_and_an_unfinished_line_left_out(tmp_path: Path) -> None:
    for _ in range(2):
        recording = Recording(CAPACITY)
        writer = PartWriter(tmp_path, recording, CAPACITY, describe)
        assert [each.suffix for each in tmp_path.iterdir()] == [RUNNING]
        record(recording, 1)
        writer.close()
    path = tmp_path / f"w.3-3{ENDED}"
    with path.open("a") as file:
        file.write('["SpanRecord", "sp')
    assert names(WorkerTrace.read(path)) == ["span 1"]
    path.write_text('{"names')
    with pytest.raises(FileNotFoundError):
        WorkerTrace.read(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / f"w.3-3{ENDED}"
    for text in ("{}\n", "[]\n", "7\n", '["SpanRecord"]\n', '{"names": 1}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a worker's trace in "):
            WorkerTrace.read(path)
