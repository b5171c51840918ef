"""The worker and the call in log records."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import zrpc
from zrpc.testing import Mesh

logger = logging.getLogger("program")


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.seen[record.getMessage().split("\n")[0]] = record


@pytest.fixture
def seen() -> Iterator[dict[str, Any]]:
    handler = _Records()
    handler.addFilter(zrpc.CallFilter())
    logging.root.addHandler(handler)
    yield handler.seen
    logging.root.removeHandler(handler)


def logs(text: str) -> None:
    logger.warning(text)


async def logs_in_a_coroutine(text: str) -> None:
    logger.warning(text)


def calls_one_that_logs(worker: str, text: str) -> None:
    zrpc.rpc_sync(worker, logs, (text,))


def logs_its_own_rank(text: str) -> None:
    logger.warning(text, extra={"rank": "mine"})


def fails() -> None:
    raise ValueError("of its own")


def tags(record: Any) -> tuple[str, str, str, str]:
    function, _, rest = record.call.partition(" #")
    number, _, caller = rest.partition(" from ")
    assert not number or int(number) > 0
    return record.rank, record.worker, function, caller


@pytest.mark.zrpc(workers=3)
def test_a_record_names_the_worker_and_the_innermost_call(mesh: Mesh, seen: dict[str, Any]) -> None:
    for function in (logs, logs_in_a_coroutine):
        mesh.run(0, zrpc.rpc_sync, 1, function, ("in a handler",))
        assert tags(seen["in a handler"]) == ("1", "worker1", function.__name__, "worker0")
    mesh.run(0, zrpc.rpc_sync, 1, calls_one_that_logs, ("worker2", "nested"))
    assert tags(seen["nested"]) == ("2", "worker2", "logs", "worker1")
    for text in ("one", "two"):
        mesh.run(0, zrpc.rpc_sync, 1, logs, (text,))
    assert seen["one"].call != seen["two"].call
    mesh.run(1, logs, "in the script")
    assert tags(seen["in the script"]) == ("1", "worker1", "", "")
    mesh.run(0, zrpc.rpc_sync, 1, logs_its_own_rank, ("extra",))
    assert (seen["extra"].rank, seen["extra"].worker) == ("mine", "worker1")


def test_outside_of_a_mesh_the_rank_is_that_of_the_environment(
    seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    logs("alone")
    monkeypatch.setenv("RANK", "3")
    logs("before init_rpc")
    assert tags(seen["alone"]) == ("", "", "", "")
    assert tags(seen["before init_rpc"]) == ("3", "", "", "")


def test_record_of_zrpc_has_them_without_the_filter(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "zrpc.calls.callee")
    with pytest.raises(ValueError, match="of its own"):
        mesh.run(0, zrpc.rpc_sync, 1, fails)
    [record] = [each for each in caplog.records if "a call of fails failed" in each.getMessage()]
    assert record.name.startswith("zrpc.")
    assert tags(record) == ("1", "worker1", "fails", "worker0")
