"""`zrpc stacks` on one host of a mesh over two."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.support.waiting import until
from tests.transport.two_hosts import SOON

WORKER = """
import os, threading, zrpc

def waits_without_end():
    threading.Event().wait()

rank = int(os.environ["RANK"])
zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(init_timeout=30))
if rank == 0:
    waiting = zrpc.rpc_async("w1", waits_without_end, timeout=0)
    print("calls", flush=True)
threading.Event().wait()
"""


def test_workers_on_another_host_are_shown_and_tell_of_one_that_is_stopped(
    start_three: Callable[[str], Any],
) -> None:
    workers = start_three(WORKER)
    until(lambda: "calls" in workers.output(0), "a mesh", within=SOON)

    def stacks(timeout: float) -> str:
        return str(workers.command("stacks", "--timeout", str(timeout)))

    shown = ["w0 (rank 0)", "w1 (rank 1)", "w2 (rank 2)", "in waits_without_end"]
    until(lambda: all(text in stacks(SOON) for text in shown), "all stacks", within=SOON)
    assert "could not be asked" not in stacks(SOON)

    os.kill(workers.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    output = stacks(1.0)
    assert time.monotonic() - begin < 10
    assert f"w2 (rank 2), pid {workers.pids[2]}" in output
    unasked = "w1 (rank 1) could not be asked: it is on another host, and did not answer"
    assert unasked in output
    assert " gets its heartbeats: its process runs, or was stopped seconds ago" in output
    until(
        lambda: any(text in stacks(0.5) for text in ("last heard from it", "is gone")),
        "the end of its heartbeats",
        within=SOON,
    )
