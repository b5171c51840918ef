"""Runs rounds: meshes over three hosts, each with one fault."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from typing import Any

from tests.partitions.network import Path, Switch, address_of, connected
from tests.partitions.plan import HEARTBEAT_SECONDS, Plan
from tests.partitions.worker import EXIT_SECONDS, SLACK
from tests.support.fault_rounds import Outcome, agree
from zrpc.launch.task import Task
from zrpc.membership.secret import new_secret
from zrpc.testing.served import send_request, start_serving
from zrpc.testing.server import warm_server
from zrpc.testing.startup import warm_up

__all__ = ["Hosts", "hosts", "run_round"]

_PORT = 29_400
# How long the workers go on after the fault, so that all that it has broken can show.
_AFTER_SECONDS = 1.0
_STEP_SECONDS = 150.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Hosts:
    """Three hosts, and the switch between them."""

    names: Sequence[str]
    switch: Switch


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    """Yields the hosts; skips the test if there can be none."""
    with connected(3, _PORT) as (names, switch):
        # Otherwise each worker imports what optimizers need itself, for seconds.
        warm_up(processes=True, preload=["torch._dynamo", "zrpc.bench.soak.phase"])
        yield Hosts(names, switch)


def run_round(plan: Plan, where: Hosts) -> Outcome:
    """Runs a round; no process of it is left."""
    directory = FilePath(tempfile.mkdtemp(prefix="zrpc-round-"))
    outcome = Outcome(plan)
    driver = _Driver(plan, where, directory, outcome)
    try:
        driver.run()
    except TimeoutError as error:
        outcome.wrong.append(str(error))
    finally:
        where.switch.mend()
        driver.end()
        if not outcome.wrong:
            shutil.rmtree(directory)
    return outcome


class _Driver:
    """One round's processes, and its fault."""

    def __init__(self, plan: Plan, where: Hosts, directory: FilePath, outcome: Outcome) -> None:
        self._plan = plan
        self._where = where
        self._directory = directory
        self._outcome = outcome
        self._pids: dict[int, int] = {}
        self._connections: dict[int, Connection] = {}  # of the workers that live
        self._asked: dict[int, str] = {}  # the step that each of these takes
        self._secret = new_secret()

    def run(self) -> None:
        plan = self._plan
        for rank in plan.founders:
            self._start(rank)
        self._take("get_ready")
        self._take("join")
        self._take("work")
        if plan.moment == "work":
            self._do_fault()
            self._answers()  # of newcomers
        time.sleep(_AFTER_SECONDS)
        self._take("stop")
        self._take("go_on")
        if plan.moment == "work":
            self._compare_members()
        self._take("look_for_leftovers")
        self._take("leave")
        self._collect()

    def _start(self, rank: int) -> None:
        plan, host = self._plan, self._plan.hosts[rank]
        runtime = self._directory / f"host{host}"
        runtime.mkdir(exist_ok=True)
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ZRPC_")},
            "RANK": str(rank),
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(_PORT),
            "ZRPC_RUNTIME_DIR": str(runtime),
            "ZRPC_SECRET": self._secret,
        }
        if not plan.newcomers:
            env["WORLD_SIZE"] = str(len(plan.hosts))

        path = [os.path.abspath(entry) for entry in sys.path]

        def task(fd: int) -> Task:
            main, namespace = "tests.partitions.worker:main", self._where.names[host]
            return Task.function(main, fd, namespace, plan, rank).within(
                cwd=str(self._directory), env=env, sys_path=path, line_buffered=True
            )

        with (self._directory / f"output.{rank}").open("ab") as output:
            fd = output.fileno()
            started = start_serving(warm_server(), task, fd, fd)
        self._pids[rank], self._connections[rank] = started

    def _ask(self, step: str, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._asked[rank] = step
            send_request(self._connections[rank], step)

    def _answers(self) -> dict[int, Any]:
        """Waits until all steps are taken; returns what they have returned, by rank."""
        end = time.monotonic() + _STEP_SECONDS
        found = {}
        for rank, step in self._asked.items():
            connection = self._connections[rank]
            try:
                if not connection.poll(max(0.0, end - time.monotonic())):
                    raise TimeoutError
                found[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):  # or the process is dead
                text = f"w{rank} has not done {step!r}:\n{self._output(rank)}"
                raise TimeoutError(text) from None
        self._asked.clear()
        return found

    def _take(self, step: str) -> dict[int, Any]:
        """Has all that live take a step, in which the fault may come."""
        self._ask(step, self._connections)
        if {"join": "init", "leave": "shutdown"}.get(step) == self._plan.moment:
            self._do_fault()
        return self._answers()

    def _do_fault(self) -> None:
        """Begins the fault, and ends it, unless it lasts; newcomers join during it and after it."""
        plan, switch = self._plan, self._where.switch
        newcomers = range(plan.founders.stop, len(plan.hosts))
        time.sleep(plan.after)
        if plan.fault.startswith("stopped"):
            self._signal(plan.victim, signal.SIGSTOP)
        elif plan.fault.startswith("one way"):
            path = Path.REFUSED if "refused" in plan.fault else Path.LOST
            switch.set(path, plan.other, plan.victim)
        elif plan.fault != "killed":
            self._cut()
        for rank in plan.dead:
            self._signal(rank, signal.SIGKILL)
            self._connections.pop(rank).close()
            self._asked.pop(rank, None)
        for rank in newcomers[:1]:
            self._start(rank)
            self._ask("join", [rank])
        for cut, whole in plan.flaps:
            self._cut()
            time.sleep(cut)
            switch.mend()
            time.sleep(whole)
        if plan.seconds is not None:
            time.sleep(plan.seconds)
            switch.mend()
            if plan.fault.startswith("stopped"):
                self._signal(plan.victim, signal.SIGCONT)
        for rank in newcomers[1:]:
            self._start(rank)
            self._ask("join", [rank])

    def _cut(self) -> None:
        victim, switch = self._plan.victim, self._where.switch
        for host in set(range(3)) - {victim}:
            switch.set(Path.LOST, victim, host)
            switch.set(Path.LOST, host, victim)

    def _signal(self, rank: int, number: int) -> None:
        warm_server().send_signal(self._pids[rank], number)

    def _compare_members(self) -> None:
        """Waits until any two workers that count each other agree about the others, too."""
        end = time.monotonic() + 2 * HEARTBEAT_SECONDS + SLACK
        while not agree(counted := {r: m for r, m in self._take("members").items() if m}):
            if time.monotonic() > end:
                self._outcome.wrong.append(f"workers disagree who the members are: {counted}")
                return
            time.sleep(_POLL_SECONDS)  # there is no event for that

    def _collect(self) -> None:
        for rank, (wrong, counts) in self._take("report").items():
            self._outcome.wrong += [f"w{rank}: {text}" for text in wrong]
            self._outcome.counts += counts
            send_request(self._connections[rank], "exit")
            code = self._exit_code(rank)
            if code:
                self._outcome.wrong.append(f"w{rank} exited with {code}:\n{self._output(rank)}")
        for host in range(3):
            if set(self._plan.on_host(host)) & set(self._plan.dead):
                continue
            left = list((self._directory / f"host{host}").rglob("*"))
            self._outcome.wrong += [f"left on host {host}: {path}" for path in left]

    def _exit_code(self, rank: int) -> int:
        pid = self._pids[rank]
        try:
            code = warm_server().wait(pid, EXIT_SECONDS)
        except TimeoutError as error:
            # It has written its stacks.
            raise TimeoutError(f"w{rank}: {error}\n{self._output(rank)}") from None
        del self._pids[rank]
        return code

    def _output(self, rank: int) -> str:
        return (self._directory / f"output.{rank}").read_text(errors="replace")[-4000:]

    def end(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for rank, pid in self._pids.items():
            self._signal(rank, signal.SIGKILL)
            warm_server().wait(pid, SLACK)
