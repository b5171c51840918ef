"""Runs rounds: a mesh of processes on this host, and a fault of one of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zrpc
from tests.kills.plan import HEARTBEAT_SECONDS, Plan
from tests.kills.worker import SLACK, members, work
from tests.support.fault_rounds import Outcome, agree
from zrpc.bench.soak.resources import measure
from zrpc.testing import Mesh, MeshSpec
from zrpc.testing.startup import start_mesh, warm_up
from zrpc.testing.watchdog import Watchdog

__all__ = ["run_round"]

# A round that takes this much longer than its work hangs.
_OVERHEAD_SECONDS = 150.0
_POLL_SECONDS = 0.2
_INTERRUPT_SECONDS = 0.2
_SHARED_MEMORY = Path("/dev/shm")
# What a worker writes after an error that no call has raised.
_CRASHES = re.compile("Exception ignored in|Exception in thread|Fatal Python error")
_SHOWN_CHARACTERS = 4000


def run_round(plan: Plan) -> Outcome:
    """Runs a round; no process of it is left."""
    outcome = Outcome(plan)
    warm_up(processes=True, preload=["zrpc.bench.soak.phase"])
    spec = MeshSpec(
        plan.workers,
        processes=True,
        timeout=plan.work_seconds + _OVERHEAD_SECONDS,
        options=plan.options,
    )
    with Watchdog(spec.timeout, outcome.wrong.append) as watchdog:
        try:
            with watchdog.interruptible():
                mesh = start_mesh(spec, watchdog, capture=True)
                _Driver(plan, mesh, outcome).run()
        except Exception as error:
            outcome.wrong.append(f"{type(error).__name__}: {error} {error.__cause__ or ''}")
        for mesh in watchdog.meshes:
            mesh.shutdown(graceful=False)
            outputs = [f"{name} wrote:\n{mesh.output(name)}" for name in mesh]
            if outcome.wrong or any(map(_CRASHES.search, outputs)):
                outcome.wrong += [text[-_SHOWN_CHARACTERS:] for text in outputs]
    return outcome


class _Driver:
    """One round's mesh, and its fault."""

    def __init__(self, plan: Plan, mesh: Mesh, outcome: Outcome) -> None:
        self._plan = plan
        self._mesh = mesh
        self._outcome = outcome
        self._pids = [mesh.pid(name) for name in mesh]

    def run(self) -> None:
        """Runs all of the round."""
        plan, mesh, wrong = self._plan, self._mesh, self._outcome.wrong
        mesh.run_all(members)  # an interrupt must not come while modules are imported
        working = {rank: mesh.submit(rank, work, plan, rank) for rank in range(plan.workers)}
        self._do_fault()
        if plan.fault == "killed":
            del working[plan.victim]
        for tally in (future.result() for future in working.values()):
            wrong += tally.violations
            self._outcome.counts += tally.done + tally.cut_off
            self._outcome.counts["cut off"] += tally.cut_off.total()
        self._compare_members()
        for rank, found in self._all(measure).items():
            wrong += [f"left on worker{rank}: {line}" for line in found.leftovers]
        began = time.monotonic()
        self._all(zrpc.shutdown, True, 60)
        if (taken := time.monotonic() - began) > 2 * HEARTBEAT_SECONDS + SLACK:
            wrong.append(f"shutdown took {taken:.1f} s")
        mesh.shutdown()
        wrong += [
            f"left in shared memory: {file.name}"
            for file in _SHARED_MEMORY.iterdir()
            if any(str(pid) in file.name for pid in self._pids)
        ]

    def _do_fault(self) -> None:
        plan, mesh = self._plan, self._mesh
        time.sleep(plan.after)
        if plan.fault == "killed":
            mesh.kill(plan.victim)
        elif plan.fault.startswith("stopped"):
            mesh.pause(plan.victim)
            time.sleep(plan.seconds)
            mesh.resume(plan.victim)
        else:
            for _ in range(1 + int(plan.seconds / _INTERRUPT_SECONDS)):
                os.kill(self._pids[plan.victim], signal.SIGINT)
                time.sleep(_INTERRUPT_SECONDS)

    def _compare_members(self) -> None:
        """Waits until workers that count each other agree; who must be a member, is one."""
        plan = self._plan
        end = time.monotonic() + HEARTBEAT_SECONDS + SLACK
        while not (agreed := agree(found := self._all(members))) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)  # there is no event for that
        certain = {rank for rank in plan.survivors if rank not in plan.suspects(rank)}
        if plan.fault == "stopped, long":
            certain.discard(plan.victim)
        if not agreed or any(not certain <= {*found[rank]} for rank in certain):
            self._outcome.wrong.append(f"the members, as each sees it: {found}")

    def _all(self, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """Returns the function's result on each survivor."""
        futures = {rank: self._mesh.submit(rank, function, *args) for rank in self._plan.survivors}
        return {rank: future.result() for rank, future in futures.items()}
