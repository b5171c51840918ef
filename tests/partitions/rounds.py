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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath

from tests.partitions.network import Path, Switch, address_of, connected
from tests.partitions.plan import Plan
from tests.partitions.worker import EXIT_SECONDS, SLACK
from tests.transport.two_hosts import ENTER
from zrpc.launch.task import Task
from zrpc.membership.secret import new_secret
from zrpc.testing.server import warm_server
from zrpc.testing.startup import warm_up

__all__ = ["Hosts", "Outcome", "hosts", "run_round"]

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


@dataclass
class Outcome:
    """What a round has found: what was wrong, and how often each action was performed."""

    plan: Plan
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


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
        self._living = set(range(len(plan.hosts)))

    def run(self) -> None:
        self._start()
        self._await("init")
        if self._plan.moment == "init":
            self._do_fault()
        self._await("ready")
        self._say("all ready")
        self._await("works", but_failed=True)
        if self._plan.moment == "work":
            self._do_fault()
        time.sleep(_AFTER_SECONDS)
        self._say("over")
        self._await("idle", but_failed=True)
        if self._plan.moment == "work":
            self._compare_members()
        self._say("all idle")
        self._await("leaves", but_failed=True)
        if self._plan.moment == "shutdown":
            self._do_fault()
        self._await("report")
        self._collect()

    def _start(self) -> None:
        script = self._directory / "worker.py"
        script.write_text(ENTER + _PROGRAM)
        secret = new_secret()
        for rank, host in enumerate(self._plan.hosts):
            runtime = self._directory / f"host{host}"
            runtime.mkdir(exist_ok=True)
            env = {
                **{k: v for k, v in os.environ.items() if not k.startswith("ZRPC_")},
                "PLAN": json.dumps(asdict(self._plan)),
                "ROUND": str(self._directory),
                "NAMESPACE": self._where.names[host],
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self._plan.hosts)),
                "MASTER_ADDR": address_of(0),
                "MASTER_PORT": str(_PORT),
                "ZRPC_RUNTIME_DIR": str(runtime),
                "ZRPC_SECRET": secret,
            }
            with (self._directory / f"output.{rank}").open("ab") as output:
                task = Task.script(str(script)).within(
                    cwd=str(self._directory), env=env, line_buffered=True
                )
                fd = output.fileno()
                self._pids[rank] = warm_server().spawn(task, stdout=fd, stderr=fd)

    def _do_fault(self) -> None:
        """Begins the fault, and ends it, unless it lasts."""
        plan, switch = self._plan, self._where.switch
        time.sleep(plan.after)
        if plan.fault.startswith("stopped"):
            self._signal(plan.victim, signal.SIGSTOP)
        elif plan.fault.startswith("one way"):
            path = Path.REFUSED if "refused" in plan.fault else Path.LOST
            switch.set(path, plan.other, plan.victim)
        elif plan.fault != "killed":
            for host in set(range(3)) - {plan.victim}:
                switch.set(Path.LOST, plan.victim, host)
                switch.set(Path.LOST, host, plan.victim)
        for rank in plan.dead:
            self._signal(rank, signal.SIGKILL)
            self._living.discard(rank)
        if plan.seconds is not None:
            time.sleep(plan.seconds)
            switch.mend()
            if plan.fault.startswith("stopped"):
                self._signal(plan.victim, signal.SIGCONT)

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
        """Any two workers that count each other agree about the others, too."""
        files = {rank: self._directory / f"idle.{rank}" for rank in self._living}
        counted = {
            rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()
        }
        for rank, members in counted.items():
            if any(counted.get(other, members) != members for other in members):
                self._outcome.wrong.append(f"w{rank} and others disagree: {counted}")

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
