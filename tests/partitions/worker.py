"""One worker of a round, in a process on its host.

It and the driver of the round tell each other by files how far they are. At the end it reports
what was wrong.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import zrpc
from tests.partitions.plan import HEARTBEAT_SECONDS, Plan
from tests.support.fault_client import FaultClient
from zrpc.bench.soak import targets
from zrpc.bench.soak.resources import measure, outstanding_work
from zrpc.errors import RpcError
from zrpc.testing.leaks import Resources

__all__ = ["EXIT_SECONDS", "SLACK", "main"]

# After its report, a process exits within this time.
EXIT_SECONDS = 60.0
_INIT_SECONDS = 10.0
# How much longer than documented things may take on a busy machine, in seconds.
SLACK = 20.0
_CLIENTS = 2
_RPC_SECONDS = 60.0
_POLL_SECONDS = 0.01


class Worker:
    """Does what a plan says, and collects what is wrong."""

    def __init__(self, plan: Plan, rank: int, directory: Path) -> None:
        self._plan = plan
        self._rank = rank
        self._name = plan.names[rank]
        self._directory = directory
        self._wrong: list[str] = []
        self._counts: dict[str, int] = {}
        self._dies = rank in plan.dead

    def run(self) -> None:
        """Runs all of the round; writes the report."""
        # A pipe that libuv keeps from the first store on.
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before = Resources.now()
        try:
            if self._join():
                self._work()
                self._go_on()
                self._leave()
        except Exception:
            self._wrong.append(traceback.format_exc())
        else:
            self._wrong += [f"left behind: {line}" for line in self._left_behind(before)]
        self._tell("report", json.dumps([self._wrong, self._counts]))

    def _left_behind(self, before: Resources) -> list[str]:
        left = before.left_behind(within=10)
        asks = self._plan.newcomers or "init_rpc failed" in self._counts
        if self._plan.store_vanishes and asks:
            # A request to it waits in its thread, with its socket, until TCP finds that out: see
            # `zrpc.membership.store_request`.
            asking = ("thread zrpc-store ", f"thread zrpc-{self._name}-log ")
            waiting = [line for line in left if line.startswith(asking)]
            sockets = [line for line in left if ": socket:" in line]
            expected = {*waiting, *sockets[: len(waiting)]}
            left = [line for line in left if line not in expected]
        return left

    def _join(self) -> bool:
        options = zrpc.ZmqRpcBackendOptions(
            init_timeout=_INIT_SECONDS,
            rpc_timeout=_RPC_SECONDS,
            heartbeat_timeout=HEARTBEAT_SECONDS,
        )
        self._tell("init")
        newcomer = self._rank not in self._plan.founders
        disturbed = self._plan.moment == "init" and self._plan.may_be_noticed
        with _Limit(self._wrong, "init_rpc", _INIT_SECONDS + SLACK + self._time_stopped()):
            try:
                zrpc.init_rpc(self._name, rpc_backend_options=options)
            except (RpcError, RuntimeError) as error:
                disturbed |= newcomer and not self._plan.must_join(self._rank)
                if not disturbed or isinstance(error, zrpc.AuthenticationError):
                    raise
                self._counts["init_rpc failed"] = 1
                self._tell("ready")
                return False
        self._tell("ready")
        return True

    def _work(self) -> None:
        """Works until the driver says that the fault is over."""
        self._await("all ready")
        plan = self._plan
        suspects = {
            name
            for rank, name in enumerate(plan.names)
            if plan.may_be_out(rank)
            or any(plan.apart(rank, other) for other in range(len(plan.names)))
        }
        # A newcomer never meets those that are gone.
        known = plan.founders if self._rank in plan.founders else self._members()
        names = [plan.names[rank] for rank in known]
        clients = [
            FaultClient(
                f"{plan.number}.{self._rank}.{number}",
                self._name,
                names,
                suspects,
                time.monotonic() + 3600,
                plan.transfer_bytes,
            )
            for number in range(_CLIENTS if len(names) > 1 else 0)
        ]
        for client in clients:
            client.start()
        self._tell("works")
        if self._plan.moment != "shutdown":
            self._await("over")
        for client in clients:
            client.until = 0
        for client in clients:
            client.join(_RPC_SECONDS + SLACK)
            if client.is_alive():
                self._wrong.append(f"stuck: {outstanding_work()}\n{_stacks()}")
                raise TimeoutError("a client does not stop")
            self._wrong += client.tally.violations
            for name, count in (client.tally.done + client.tally.cut_off).items():
                self._counts[name] = self._counts.get(name, 0) + count
            cut_off = sum(client.tally.cut_off.values())
            self._counts["cut off"] = self._counts.get("cut off", 0) + cut_off

    def _go_on(self) -> None:
        """Workers that the fault did not separate still call each other, and agree who they are."""
        plan = self._plan
        for rank, name in enumerate(plan.names):
            if rank == self._rank or (plan.newcomers and rank not in self._members()):
                continue
            out = self._plan.may_be_out(self._rank) or self._plan.may_be_out(rank)
            apart = out or self._plan.apart(self._rank, rank)
            with _Limit(self._wrong, f"a call to {name}", HEARTBEAT_SECONDS + SLACK):
                try:
                    found = zrpc.rpc_sync(name, targets.hop, ([], rank))
                except zrpc.WorkerDied as error:
                    # It may have failed to join.
                    if not apart and plan.moment != "init":
                        raise
                    if not str(error).startswith(f"worker {name} (rank {rank}) is gone: "):
                        self._wrong.append(f"an error that does not name the lost worker: {error}")
                else:
                    if apart and plan.separated_for_good:
                        self._wrong.append(f"{name} was cut off, and is back")
                    if found != rank:
                        self._wrong.append(f"{name}: expected {rank}, found {found}")
        self._await("all idle", self._tell_members)
        # On each: what one keeps for its clients, for example RRefs, is nothing left of the others.
        self._wrong += measure().leftovers

    def _members(self) -> list[int]:
        infos = zrpc.api._get_current_rpc_agent().get_worker_infos()
        return sorted(info.id for info in infos)

    def _tell_members(self) -> None:
        self._tell("idle", json.dumps(self._members()))

    def _leave(self) -> None:
        self._tell("leaves")
        limit = 3 * HEARTBEAT_SECONDS + SLACK + self._time_stopped()
        if self._plan.moment == "shutdown" and self._plan.seconds:
            limit += self._plan.seconds
        with _Limit(self._wrong, "shutdown", limit):
            zrpc.shutdown(timeout=120)

    def _time_stopped(self) -> float:
        plan = self._plan
        stopped = plan.fault.startswith("stopped") and plan.victim == self._rank
        return plan.seconds or 0.0 if stopped else 0.0

    def _tell(self, what: str, text: str = "") -> None:
        name = f"{what}.{self._rank}"
        new = self._directory / f"{name}.new"
        new.write_text(text)
        new.rename(self._directory / name)

    def _await(self, what: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        end = time.monotonic() + 300
        while not (self._directory / what).exists():
            meanwhile()
            if time.monotonic() > end:
                raise TimeoutError(f"the driver did not say {what!r}")
            time.sleep(_POLL_SECONDS)  # another process writes the file


class _Limit:
    """Notes that something took longer than it may."""

    def __init__(self, wrong: list[str], what: str, seconds: float) -> None:
        self._wrong, self._what, self._seconds = wrong, what, seconds

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        taken = time.monotonic() - self._began
        if taken > self._seconds:
            self._wrong.append(f"{self._what} took {taken:.1f} s, longer than {self._seconds:.1f}")


def _stacks() -> str:
    frames = sys._current_frames().values()
    return "\n\n".join("".join(traceback.format_stack(frame)) for frame in frames)


def main() -> None:
    """Runs the worker that the environment describes."""
    data = json.loads(os.environ["PLAN"])
    hosts, flaps = tuple(data["hosts"]), tuple(map(tuple, data["flaps"]))
    plan = Plan(**{**data, "hosts": hosts, "flaps": flaps})
    Worker(plan, int(os.environ["RANK"]), Path(os.environ["ROUND"])).run()
    faulthandler.dump_traceback_later(EXIT_SECONDS - 10)
