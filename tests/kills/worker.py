"""What the workers of a round do, in their main threads."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
import time

import zrpc
from tests.kills.plan import HEARTBEAT_SECONDS, Plan
from tests.support.fault_client import FaultClient
from zrpc.bench.soak import targets
from zrpc.bench.soak.client import Tally
from zrpc.bench.soak.resources import outstanding_work

__all__ = ["SLACK", "members", "work"]

# How much longer than documented things may take on a busy machine, in seconds.
SLACK = 15.0
_MOST_BYTES = 16 << 20


def work(plan: Plan, rank: int) -> Tally:
    """Works until the time of the plan is over, in this thread and another one."""
    # A shell that starts the command in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = [f"worker{each}" for each in range(plan.workers)]
    suspects = {names[each] for each in plan.suspects(rank)}
    until = time.monotonic() + plan.work_seconds
    stopped = plan.seconds if rank == plan.victim else 0.0
    limit = HEARTBEAT_SECONDS + SLACK + stopped

    clients: list[FaultClient] = []

    def client(interrupted: bool) -> FaultClient:
        name = f"{plan.seed}.{plan.number}.{rank}.{len(clients)}"
        new = FaultClient(
            name, names[rank], names, suspects, until, _MOST_BYTES, limit, interrupted
        )
        clients.append(new)
        return new

    beside = client(False)
    beside.start()
    while time.monotonic() < until:
        try:
            client(plan.fault == "interrupted, stays").run()
        except KeyboardInterrupt:
            clients[-1].tally.done["interrupted"] += 1
            if plan.fault == "interrupted, leaves":
                beside.suspects, beside.leaves, beside.until = names, True, 0
                zrpc.shutdown(graceful=False)
                break
    beside.join(max(0.0, until - time.monotonic()) + limit)
    tally = Tally()
    if beside.is_alive():
        faulthandler.dump_traceback(sys.stdout)
        tally.violations.append(f"a client does not stop: {outstanding_work()}")
    for each in clients:
        each.kept.clear()
        tally.add(each.tally)
    return tally


def members() -> list[int]:
    """Returns the ranks of the members, as this worker sees it, once it has called each."""
    for info in zrpc.get_worker_infos():
        with contextlib.suppress(zrpc.WorkerDied):
            zrpc.rpc_sync(info, targets.hop, ([], 0))
    return sorted(info.id for info in zrpc.get_worker_infos())
