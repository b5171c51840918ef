"""`zrpc top` on one host of a mesh over two, and a trace of all its workers."""

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
import os, pathlib, time, zrpc

def pauses(seconds):
    time.sleep(seconds)
    return zrpc.rpc_sync("w2", max, (1, 2))

rank = int(os.environ["RANK"])
zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(init_timeout=30))
if rank == 0:
    with zrpc.trace("trace.json"):
        zrpc.rpc_sync("w1", pauses, (0.01,))
    print("traced", flush=True)
while True:
    if rank == 0:
        zrpc.rpc_sync("w2", max, (1, 2))
    time.sleep(0.01)
"""


def test_workers_on_another_host_are_shown_by_top_and_in_a_trace(
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

    os.kill(workers.pids[1], signal.SIGSTOP)
    stopped = top(0.5)["w1"]
    assert stopped["state"] in ("no answer", "lost")
    assert stopped["calls_in"] is None
    assert stopped["why"]
