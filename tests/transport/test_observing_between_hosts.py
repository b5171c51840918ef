"""`zrpc top`, `zrpc stacks` and a trace on one host of a mesh over two."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.services.tracing.test_trace import Trace
from tests.support.waiting import until
from tests.transport.two_hosts import SOON

WORKER = """
import os, threading, time, zrpc

def pauses(seconds):
    time.sleep(seconds)
    return zrpc.rpc_sync("w2", max, (1, 2))

def waits_without_end():
    threading.Event().wait()

rank = int(os.environ["RANK"])
zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(init_timeout=30))
if rank == 0:
    with zrpc.trace("trace.json"):
        zrpc.rpc_sync("w1", pauses, (0.01,))
    waiting = zrpc.rpc_async("w1", waits_without_end, timeout=0)
    print("traced", flush=True)
while True:
    if rank == 0:
        zrpc.rpc_sync("w2", max, (1, 2))
    time.sleep(0.01)
"""


def test_workers_on_another_host_are_shown_and_told_of_one_that_is_stopped(
    start_three: Callable[[str], Any], tmp_path: Path
) -> None:
    workers = start_three(WORKER)
    until(lambda: "traced" in workers.output(0), "a trace", within=2 * SOON)

    def top(interval: float) -> dict[str, Any]:
        shown = workers.command("top", "--once", "--json", "--interval", str(interval))
        [mesh] = json.loads(shown)["meshes"]
        return {worker["name"]: worker for worker in mesh["workers"]}

    def all_have_rates() -> Any:
        shown = top(2.0)
        return all(each["calls_in"] is not None for each in shown.values()) and shown

    shown = until(all_have_rates, "rates of all workers", within=2 * SOON)
    assert [each["pid"] for each in shown.values()] == workers.pids
    assert {each["state"] for each in shown.values()} == {"running"}
    assert shown["w2"]["calls_in"] > 0
    assert [each["name"] for each in shown["w2"]["functions"]] == ["max"]
    assert shown["w2"]["memory"] > 2**20

    trace = Trace(tmp_path / "trace.json")
    assert trace.file["otherData"]["missing"] == []
    outer, inner = trace.slice("rpc_sync#pauses(w0 -> w1)", 0), trace.slice("pauses", 1)
    nested, leaf = trace.slice("rpc_sync#max(w1 -> w2)", 1), trace.slice("max", 2)
    for cause, effect in ((outer, inner), (inner, nested), (nested, leaf)):
        assert cause["ts"] <= effect["ts"]
        assert effect["end"] <= cause["end"]
    assert [(a["name"], b["name"]) for a, b in trace.arrows()] == [
        (outer["name"], "pauses"),
        (nested["name"], "max"),
    ]

    def stacks(timeout: float) -> str:
        return str(workers.command("stacks", "--timeout", str(timeout)))

    names = ["w0 (rank 0)", "w1 (rank 1)", "w2 (rank 2)", "in waits_without_end"]
    until(lambda: all(text in stacks(SOON) for text in names), "all stacks", within=SOON)
    assert "could not be asked" not in stacks(SOON)

    os.kill(workers.pids[1], signal.SIGSTOP)
    output = stacks(1.0)
    assert f"w2 (rank 2), pid {workers.pids[2]}" in output
    unasked = "w1 (rank 1) could not be asked: it is on another host, and did not answer"
    assert unasked in output
    assert " gets its heartbeats: its process runs, or was stopped seconds ago" in output
    until(
        lambda: any(text in stacks(0.5) for text in ("last heard from it", "is gone")),
        "the end of its heartbeats",
        within=SOON,
    )
    stopped = top(2.0)["w1"]
    assert stopped["state"] in ("no answer", "lost")
    assert stopped["calls_in"] is None
    assert stopped["why"]
