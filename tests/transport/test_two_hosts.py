"""Workers on two hosts: two network namespaces with a cable between them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.partitions.network import Path as Way
from tests.partitions.network import Switch, address_of
from tests.services.tracing.test_trace import Trace
from tests.support.waiting import until
from tests.transport.two_hosts import SOON
from zrpc.membership.secret import new_secret, write_secret

StartWorkers = Callable[..., Any]

WORKER = """
import os
import torch, zrpc

def listeners():
    found = set()
    for name in ("tcp", "tcp6"):
        with open("/proc/thread-self/net/" + name) as file:
            rows = [line.split() for line in file][1:]
        found |= {row[1].split(":")[0] for row in rows if row[3] == "0A"}
    return sorted(found)

rank = int(os.environ["RANK"])
zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(init_timeout=15))
print(zrpc.rpc_sync(1 - rank, torch.add, (torch.ones(500_000), rank)).sum().item())
print("listening at", *listeners())
zrpc.shutdown()
"""


@pytest.mark.parametrize("interface", [{}, {"ZRPC_IFACE": "cable"}])
def test_workers_on_two_hosts_exchange_calls(
    start_workers: StartWorkers, tmp_path: Path, interface: dict[str, str]
) -> None:
    write_secret(tmp_path / "secret", new_secret())
    variables = {"ZRPC_SECRET_FILE": str(tmp_path / "secret"), **interface}
    workers = start_workers(WORKER, variables, variables)
    for rank, (code, output) in enumerate(workers.outcomes()):
        assert code == 0, output
        assert f"{500_000 * (1 + rank):.1f}\n" in output
        assert f"name=w{rank}) listens on tcp://{address_of(rank)}:" in output
        assert "(CURVE)" in output
        # Rank 0's store, too, only on this interface, in the kernel's notation.
        assert f"listening at 0{rank + 1}004E0A\n" in output


def test_containers_that_listen_on_their_loopback_are_told(start_workers: StartWorkers) -> None:
    """They have one boot id, and a loopback interface each."""
    variables = {"ZRPC_SECRET": new_secret(), "ZRPC_IFACE": "lo"}
    for code, output in start_workers(WORKER, variables, variables).outcomes():
        assert code == 1
        assert "listens on tcp://127.0.0.1:" in output
        assert "which other hosts and containers can't reach: set ZRPC_IFACE there" in output


# -- what one host shows of a mesh over both ----------------------------------------------

OBSERVED = """
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
    start_workers: StartWorkers, tmp_path: Path
) -> None:
    write_secret(tmp_path / "secret", new_secret())
    variables = {"ZRPC_SECRET_FILE": str(tmp_path / "secret"), "WORLD_SIZE": "3"}
    workers = start_workers(OBSERVED, *[variables] * 3, on=(0, 1, 1))
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
    calls = trace.slice("rpc_sync#pauses(w0 -> w1)", 0), trace.slice("rpc_sync#max(w1 -> w2)", 1)
    assert [(a["name"], b["name"]) for a, b in trace.arrows()] == [
        (calls[0]["name"], "pauses"),
        (calls[1]["name"], "max"),
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


# -- a network between them that is interrupted --------------------------------------------


FILES = """
import os, time
import zrpc

def await_file(name):
    end = time.monotonic() + 60
    while not os.path.exists(name):
        assert time.monotonic() < end, name
        time.sleep(0.01)

"""

BLACK_HOLE = """
rank = int(os.environ["RANK"])
zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(init_timeout=15))
assert zrpc.rpc_sync(f"w{1 - rank}", max, (1, 2)) == 2
open(f"ready{rank}", "w").close()
if rank == 0:
    await_file("cut")
    assert zrpc.rpc_sync("w1", max, (1, 2)) == 2
    try:
        zrpc.rpc_sync("w1", len, (bytes(100_000),), timeout=12)
    except zrpc.RpcTimeoutError as error:
        print(error)
    open("seen", "w").close()
await_file("seen")
zrpc.shutdown(graceful=False)
"""


def test_large_packets_that_are_lost_are_reported(
    start_workers: StartWorkers, switch: Switch, tmp_path: Path
) -> None:
    workers = start_workers(FILES + BLACK_HOLE, *[{"ZRPC_SECRET": new_secret()}] * 2)
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), within=SOON)
    switch.set(Way.LARGE_LOST, 0, 1)
    (tmp_path / "cut").touch()
    for code, output in workers.outcomes():
        assert code == 0, output
    output = workers.output(0)
    said = f"large packets do not reach w1 (rank 1) at tcp://{address_of(1)}:"
    assert output.count(said) == 2, output  # in the log, and in the error
    assert "MTU" in output


# -- a firewall that refuses connections ----------------------------------------------------

ONE_WAY = """
rank = int(os.environ["RANK"])
options = zrpc.ZmqRpcBackendOptions(init_timeout=15, heartbeat_timeout=2)
zrpc.init_rpc(f"w{rank}", rpc_backend_options=options)
try:
    zrpc.rpc_sync(f"w{1 - rank}", max, (1, 2), timeout=0)
except zrpc.WorkerDied as error:
    print("WorkerDied:", error)
# Once w1 has left, the reason that w0 finds would be that its process has ended.
if rank == 0:
    open("told", "w").close()
await_file("told")
zrpc.shutdown()
"""


def test_a_firewall_that_refuses_all_but_the_port_of_the_master(
    start_workers: StartWorkers, switch: Switch
) -> None:
    """Both are told, with the address, and the shutdown of both ends."""
    switch.set(Way.REFUSED, 1, 0)
    workers = start_workers(FILES + ONE_WAY, *[{"ZRPC_SECRET": new_secret()}] * 2)
    (code, output), (other_code, other_output) = workers.outcomes()
    assert (code, other_code) == (0, 0), output + other_output
    address = re.search(r"listens on (tcp://\S+)", output)
    assert address
    assert "WorkerDied: worker w1 (rank 1) is gone: it could not connect to this worker" in output
    assert f"it has tried {address[1]}, where this worker listens" in output
    refused = f"or a firewall refuses connections to it at {address[1]}"
    assert refused in other_output
