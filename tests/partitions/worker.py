"""One worker of a round, in a process on its host.

The driver of the round has it take one step after another. At the end it reports what was wrong.
"""

from __future__ import annotations

import faulthandler
import pickle
import sys
import time
import traceback
from collections import Counter

import torch.distributed as dist

import zrpc
from tests.partitions.plan import HEARTBEAT_SECONDS, Plan
from tests.support.fault_client import FaultClient
from zrpc.bench.namespaces import enter
from zrpc.bench.soak import targets
from zrpc.bench.soak.resources import measure, outstanding_work
from zrpc.errors import RpcError
from zrpc.testing.leaks import Resources
from zrpc.testing.served import serve

__all__ = ["EXIT_SECONDS", "SLACK", "main"]

# After its report, a process exits within this time.
EXIT_SECONDS = 60.0
_INIT_SECONDS = 10.0
# How much longer than documented things may take on a busy machine, in seconds.
SLACK = 20.0
_CLIENTS = 2
_RPC_SECONDS = 60.0


class Worker:
    """Does what a plan says, and collects what is wrong. Its public methods are the steps."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._name = plan.names[rank]
        self._wrong: list[str] = []
        self._counts: Counter[str] = Counter()
        self._clients: list[FaultClient] = []
        self._is_out = self._failed = False  # it could not join; a step has raised an error
        # A pipe that libuv keeps from the first store on.
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._before = Resources.now()

    def do(self, step: str) -> bytes:
        """Takes a step, unless it is no longer in the mesh; returns what that returns, pickled."""
        found = None
        if step == "report" or not (self._is_out or self._failed):
            try:
                found = getattr(self, step)()
            except Exception:
                self._wrong.append(traceback.format_exc())
                self._failed = True
        return pickle.dumps(found)

    def get_ready(self) -> None:
        """Does nothing: the process has begun."""

    def report(self) -> tuple[list[str], Counter[str]]:
        """Returns what was wrong, and how often each action was performed."""
        if not self._failed:
            self._wrong += [f"left behind: {line}" for line in self._left_behind(self._before)]
        return self._wrong, self._counts

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

    def join(self) -> None:
        """Joins the mesh, unless the fault prevents that. A newcomer begins to work."""
        options = zrpc.ZmqRpcBackendOptions(
            init_timeout=_INIT_SECONDS,
            rpc_timeout=_RPC_SECONDS,
            heartbeat_timeout=HEARTBEAT_SECONDS,
        )
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
                self._is_out = True
                return
        if newcomer:
            self.work()

    def work(self) -> None:
        """Begins to work, until `stop`."""
        plan = self._plan
        suspects = {
            name
            for rank, name in enumerate(plan.names)
            if plan.may_be_out(rank)
            or any(plan.apart(rank, other) for other in range(len(plan.names)))
        }
        # A newcomer never meets those that are gone.
        known = plan.founders if self._rank in plan.founders else self.members()
        names = [plan.names[rank] for rank in known]
        self._clients = [
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
        for client in self._clients:
            client.start()

    def stop(self) -> None:
        """Ends the work."""
        for client in self._clients:
            client.until = 0
        for client in self._clients:
            client.join(_RPC_SECONDS + SLACK)
            if client.is_alive():
                self._wrong.append(f"stuck: {outstanding_work()}\n{_stacks()}")
                raise TimeoutError("a client does not stop")
            self._wrong += client.tally.violations
            self._counts += client.tally.done + client.tally.cut_off
            self._counts["cut off"] += client.tally.cut_off.total()

    def go_on(self) -> None:
        """Workers that the fault did not separate still call each other, and agree who they are."""
        plan = self._plan
        for rank, name in enumerate(plan.names):
            if rank == self._rank or (plan.newcomers and rank not in self.members()):
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

    def look_for_leftovers(self) -> None:
        """Notes what is left of the work, of this worker's and that which it does for others."""
        self._wrong += measure().leftovers

    def members(self) -> list[int]:
        """Returns the ranks of the members, as this worker sees it."""
        return sorted(info.id for info in zrpc.get_worker_infos())

    def leave(self) -> None:
        """Leaves the mesh, together with the others."""
        limit = 3 * HEARTBEAT_SECONDS + SLACK + self._time_stopped()
        if self._plan.moment == "shutdown" and self._plan.seconds:
            limit += self._plan.seconds
        with _Limit(self._wrong, "shutdown", limit):
            zrpc.shutdown(timeout=120)

    def _time_stopped(self) -> float:
        plan = self._plan
        stopped = plan.fault.startswith("stopped") and plan.victim == self._rank
        return plan.seconds or 0.0 if stopped else 0.0


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


def main(fd: int, namespace: str, plan: Plan, rank: int) -> None:
    """Runs the worker of a rank on the host of a namespace, and serves the driver's requests."""
    enter(namespace)
    serve(fd, Worker(plan, rank).do)
    faulthandler.dump_traceback_later(EXIT_SECONDS - 10)
