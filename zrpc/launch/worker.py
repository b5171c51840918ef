"""One worker: its rank, what it is told of the others, and how it ended."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass

RESERVED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ZRPC_WORKER_NAME",
    "ZRPC_RUNTIME_DIR",
    "ZRPC_MAX_RESTARTS",
)
# Where the workers' common secret stands, or the file with it; see zrpc.secret.
SECRET = "ZRPC_SECRET"
SECRET_FILE = "ZRPC_SECRET_FILE"
_NAME_PREFIX = re.compile(r"[A-Za-z0-9_:-]{0,120}")


@dataclass
class Worker:
    """A worker process.

    Attributes:
        rank: Its rank, from 0.
        pid: Its process id.
        restarts: How often it was started again.
        returncode: None while it runs; then its exit code, or minus the signal that killed it.
    """

    rank: int
    pid: int
    restarts: int = 0
    returncode: int | None = None

    @property
    def exit_code(self) -> int:
        """Its end as a shell shows it: 128 and the signal's number after a signal."""
        code = self.returncode or 0
        return code if code >= 0 else 128 - code

    def end(self) -> str:
        """Its end in words."""
        code = self.returncode or 0
        if code >= 0:
            return f"exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL":
            return "SIGKILL, which it did not get from here (out of memory?)"
        return name


def base_environment(nprocs: int, extra: Mapping[str, str]) -> dict[str, str]:
    """What all workers' environments have in common.

    Args:
        nprocs: How many workers share this machine.
        extra: Variables to add to those of this process.

    Raises:
        ValueError: `extra` sets a variable that differs between workers or belongs to a run, or
            one that should not be written on a command line.
    """
    if SECRET in extra:
        raise ValueError(
            f"{SECRET} can't be set here: all users of this machine can read command lines. Set "
            f"it in the environment, or name a file by {SECRET_FILE}"
        )
    if taken := sorted(set(extra).intersection(RESERVED)):
        raise ValueError(f"{', '.join(taken)} can't be set: each worker is told its own value")
    # An outer launcher's variables would have workers look for a store that isn't theirs.
    outer = ("TORCHELASTIC_", "ZRPC_MAX_RESTARTS")
    base = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    if nprocs > 1:
        base.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: N workers with all cores each crawl
    env = {**base, **extra}
    return {**env, **run_secret(env)}


def run_secret(env: Mapping[str, str]) -> dict[str, str]:
    """The variable with a new secret for the workers of one run; nothing where `env` has one.

    Only this user can read the environment of a process; its command line all can.
    """
    if env.get(SECRET) or env.get(SECRET_FILE):
        return {}
    return {SECRET: secrets.token_hex(32)}


@dataclass(frozen=True)
class Surroundings:
    """What all workers of one launch find.

    Attributes:
        nprocs: How many they are.
        prefix: Of their names.
        host: Where they meet.
        port: Likewise.
        runtime_dir: For their sockets; None for where the system has temporary files.
        first_rank: Of this launch.
        elastic: Whether their number is not fixed.
        max_restarts: How often each is started again where it fails.
    """

    nprocs: int
    prefix: str
    host: str
    port: int
    runtime_dir: str | None
    first_rank: int = 0
    elastic: bool = False
    max_restarts: int = 0

    def environment(self, base: Mapping[str, str], rank: int, restarts: int) -> dict[str, str]:
        """The environment of one worker: `base` and what differs or belongs to this run.

        Args:
            base: What all have in common.
            rank: The worker's.
            restarts: How often it was started again.
        """
        env = {
            **base,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.first_rank),
            "WORLD_SIZE": str(self.nprocs),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "ZRPC_WORKER_NAME": f"{self.prefix}{rank}",
        }
        if self.runtime_dir is not None:
            env["ZRPC_RUNTIME_DIR"] = self.runtime_dir
        if self.elastic:
            del env["WORLD_SIZE"]
        if self.elastic or self.max_restarts:  # there is a store beside the workers
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            env["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
            env["TORCHELASTIC_MAX_RESTARTS"] = str(self.max_restarts)
        if self.max_restarts:
            env["ZRPC_MAX_RESTARTS"] = str(self.max_restarts)
        return env


def check_name_prefix(prefix: str) -> None:
    """Refuse a prefix that doesn't make worker names.

    Raises:
        ValueError: It has a character that names can't have, or is too long.
    """
    if not _NAME_PREFIX.fullmatch(prefix):
        raise ValueError(
            "a worker's name takes letters, digits, '-', '_' and ':', and the prefix at most 120 "
            f"of them, but got {prefix!r}"
        )
