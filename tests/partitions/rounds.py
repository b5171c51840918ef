"""Runs rounds: meshes over three hosts, each with one fault."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath

from tests.partitions.network import Path, Switch, address_of, connected
from tests.partitions.plan import HEARTBEAT_SECONDS, Plan
from tests.partitions.worker import EXIT_SECONDS, SLACK
from tests.support.fault_rounds import Outcome
from tests.transport.two_hosts import ENTER
from zrpc.launch.task import Task
from zrpc.membership.secret import new_secret
from zrpc.testing.server import warm_server
from zrpc.testing.startup import warm_up

__all__ = ["Hosts", "hosts", "run_round"]

_ROOT = FilePath(__file__).parents[2]
_PROGRAM = f"""
sys.path.insert(0, {str(_ROOT)!r})
from tests.partitions.worker import main
main()
"""
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
        self._secret = new_secret()
        self._living: set[int] = set()

    def run(self) -> None:
        plan = self._plan
        (self._directory / "worker.py").write_text(ENTER + _PROGRAM)
        for rank in plan.founders:
            self._start(rank)
        self._await("init")
        if plan.moment == "init":
            self._do_fault()
        self._await("ready")
        self._say("all ready")
        self._await("works", but_failed=True)
        if plan.moment == "work":
            self._do_fault()
        self._await("ready", but_failed=True)
        time.sleep(_AFTER_SECONDS)
        self._say("over")
        self._await("idle", but_failed=True)
        if plan.moment == "work":
            self._compare_members()
        self._say("all idle")
        self._await("leaves", but_failed=True)
        if plan.moment == "shutdown":
            self._do_fault()
        self._await("report")
        self._collect()

    def _start(self, rank: int) -> None:
        plan, host = self._plan, self._plan.hosts[rank]
        runtime = self._directory / f"host{host}"
        runtime.mkdir(exist_ok=True)
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ZRPC_")},
            "PLAN": json.dumps(asdict(plan)),
            "ROUND": str(self._directory),
            "NAMESPACE": self._where.names[host],
            "RANK": str(rank),
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(_PORT),
            "ZRPC_RUNTIME_DIR": str(runtime),
            "ZRPC_SECRET": self._secret,
        }
        if not plan.newcomers:
            env["WORLD_SIZE"] = str(len(plan.hosts))
        with (self._directory / f"output.{rank}").open("ab") as output:
            task = Task.script(str(self._directory / "worker.py")).within(
                cwd=str(self._directory), env=env, line_buffered=True
            )
            fd = output.fileno()
            self._pids[rank] = warm_server().spawn(task, stdout=fd, stderr=fd)
        self._living.add(rank)

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
            self._living.discard(rank)
        for rank in newcomers[:1]:
            self._start(rank)
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

    def _cut(self) -> None:
        victim, switch = self._plan.victim, self._where.switch
        for host in set(range(3)) - {victim}:
            switch.set(Path.LOST, victim, host)
            switch.set(Path.LOST, host, victim)

    def _signal(self, rank: int, number: int) -> None:
        warm_server().send_signal(self._pids[rank], number)

    def _await(self, what: str, but_failed: bool = False) -> None:
        """Waits until all living workers are that far, or, `but_failed`, have reported."""
        end = time.monotonic() + _STEP_SECONDS
        for rank in self._living:
            names = [what, "report"] if but_failed else [what]
            while not any((self._directory / f"{name}.{rank}").exists() for name in names):
                if time.monotonic() > end or not FilePath(f"/proc/{self._pids[rank]}/ns").exists():
                    raise TimeoutError(f"w{rank} was never at {what!r}:\n{self._output(rank)}")
                time.sleep(_POLL_SECONDS)

    def _say(self, what: str) -> None:
        (self._directory / what).touch()

    def _compare_members(self) -> None:
        """Waits until any two workers that count each other agree about the others, too."""
        end = time.monotonic() + 2 * HEARTBEAT_SECONDS + SLACK
        while not _agree(counted := self._counted()):
            if time.monotonic() > end:
                self._outcome.wrong.append(f"workers disagree who the members are: {counted}")
                return
            time.sleep(_POLL_SECONDS)  # other processes write the files

    def _counted(self) -> dict[int, list[int]]:
        """Returns whom each worker counts as a member."""
        files = {rank: self._directory / f"idle.{rank}" for rank in self._living}
        return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    def _collect(self) -> None:
        for rank in self._living:
            wrong, counts = json.loads((self._directory / f"report.{rank}").read_text())
            self._outcome.wrong += [f"w{rank}: {text}" for text in wrong]
            self._outcome.counts += Counter(counts)
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
        for rank, pid in self._pids.items():
            self._signal(rank, signal.SIGKILL)
            warm_server().wait(pid, SLACK)


def _agree(counted: Mapping[int, list[int]]) -> bool:
    return all(
        counted.get(other, members) == members for members in counted.values() for other in members
    )
