"""One worker: its role and rank, the environment variables it gets, and its exit."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,120}")


@dataclass(frozen=True)
class Member:
    """One worker: its role, and its name, which is the role and a number."""

    role: str
    name: str


class Roles(tuple[Member, ...]):
    """The workers by rank.

    Example:
        >>> [member.name for member in Roles.of({"learner": 1, "rollout": 2})]
        ['learner0', 'rollout0', 'rollout1']
    """

    __slots__ = ()

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Self:
        """Makes the workers of each role, which are counted from 0.

        Args:
            counts: the number of workers of each role.

        Raises:
            ValueError: a number is below 1, a role can't be part of a worker's name, or two workers
                would have one name.
        """
        for role, count in counts.items():
            if not _NAME.fullmatch(role):
                raise ValueError(
                    "expected a role of 1 to 120 letters, digits, '-', '_' and ':', but got "
                    f"{role!r}"
                )
            if count < 1:
                raise ValueError(f"expected 1 worker or more of the role {role}, but got {count}")
        found = cls(Member(role, f"{role}{i}") for role, n in counts.items() for i in range(n))
        names = [member.name for member in found]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two workers would have the name {twice[0]}: give the roles {sorted(counts)} "
                "other names, such as ones that end with a letter"
            )
        return found


RESERVED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ZRPC_WORKER_NAME",
    "ZRPC_ROLE",
    "ZRPC_RUNTIME_DIR",
    "ZRPC_MAX_RESTARTS",
    "ZRPC_STORE_DIR",
    "ZRPC_LAUNCHED",
)
# Says which variables were set for this worker, as JSON; see zrpc.membership.launched.
LAUNCHED = "ZRPC_LAUNCHED"
# Files in the private directory, read by zrpc.membership.launched.
STOP_NOTE = "launch-stops"
ENDED_NOTE = "launch-ended"
_RUNTIME_DIRECTORY = "ZRPC_RUNTIME_DIR"
# Workers of two meshes would write the same files, and listen on the same ports.
_OF_ONE_MESH = ("ZRPC_TRACE", "ZRPC_METRICS_PORT")
# The variables with the workers' common secret, or with its file; see zrpc.membership.secret.
SECRET = "ZRPC_SECRET"
SECRET_FILE = "ZRPC_SECRET_FILE"


@dataclass
class Worker:
    """A worker process."""

    rank: int
    pid: int
    restarts: int = 0  # how often it was started again
    # None while it runs; then its exit code, or minus the number of the signal that killed it.
    returncode: int | None = None

    @property
    def exit_code(self) -> int:
        """Its exit code as a shell shows it: 128 plus the signal's number after a signal."""
        code = self.returncode or 0
        return code if code >= 0 else 128 - code

    def describe_end(self, sender: str = "this launcher") -> str:
        """Describes how it ended; ``sender`` is what would stop it."""
        code = self.returncode or 0
        if code >= 0:
            return f"exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL":
            return f"SIGKILL, not sent by {sender} (out of memory?)"
        return name


def base_environment(nprocs: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that all `nprocs` workers' environments have in common.

    They are those of this process and the extra ones.

    Raises:
        ValueError: `extra` sets a variable that the launcher sets itself, or one that should not
            be written on a command line.
        TypeError: a variable or its value isn't a str.
    """
    if SECRET in extra:
        raise ValueError(
            f"{SECRET} can't be set here: all users of this machine can read command lines. Set "
            f"it in the environment, or name a file in {SECRET_FILE}"
        )
    if taken := sorted(set(extra).intersection(RESERVED)):
        raise ValueError(f"{', '.join(taken)} can't be set: each worker gets its own value")
    # An outer launcher's variables would make workers look for a store that isn't theirs.
    outer = ("TORCHELASTIC_", "ZRPC_MAX_RESTARTS", "ZRPC_STORE_DIR")
    environ = without_launcher(os.environ)
    base = {key: value for key, value in environ.items() if not key.startswith(outer)}
    if nprocs > 1:
        base.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: N workers on all cores are slow
    env = {**base, **extra}
    for key, value in extra.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"expected variables and values of type str, but got {key!r}: {value!r}"
            )
    return {**env, **run_secret(env)}


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what `zrpc launch` has set in it for one worker.

    The directory for sockets stays the one in which the launcher has made that of its workers.
    """
    try:
        made = json.loads(env.get(LAUNCHED, "{}"))
    except ValueError:
        made = {}
    left = {key: value for key, value in env.items() if made.get(key) != value}
    left.pop(LAUNCHED, None)
    if _RUNTIME_DIRECTORY in env and _RUNTIME_DIRECTORY not in left:
        left[_RUNTIME_DIRECTORY] = os.path.dirname(env[_RUNTIME_DIRECTORY])
    return left


def run_secret(env: Mapping[str, str]) -> dict[str, str]:
    """Returns a variable with a new secret for the workers of one run, or none if `env` has one.

    All users can read the command line of a process, but only this user its environment.
    """
    if env.get(SECRET) or env.get(SECRET_FILE):
        return {}
    return {SECRET: secrets.token_hex(32)}


@dataclass(frozen=True)
class EnvironmentTemplate:
    """Makes the environments of all workers of one launch. See `Job` for what isn't told here."""

    nprocs: int
    prefix: str  # of their names, unless they have roles
    host: str  # where they meet, at this port
    port: int
    runtime_dir: str | None  # for their sockets; None for the system's temporary directory
    first_rank: int = 0
    elastic: bool = False
    max_restarts: int = 0
    roles: Sequence[Member] = ()

    def for_worker(self, base: Mapping[str, str], rank: int, restarts: int) -> dict[str, str]:
        """Returns the environment of one worker: `base` and the variables of this launch."""
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.first_rank),
            "WORLD_SIZE": str(self.nprocs),
            "LOCAL_WORLD_SIZE": str(self.nprocs),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "ZRPC_WORKER_NAME": f"{self.prefix}{rank}",
        }
        if self.roles:
            member = self.roles[rank]
            env |= {"ZRPC_WORKER_NAME": member.name, "ZRPC_ROLE": member.role}
        if self.runtime_dir is not None:
            env["ZRPC_RUNTIME_DIR"] = self.runtime_dir
        if self.elastic:
            del env["WORLD_SIZE"]
        if self.elastic or self.max_restarts:  # the store has a process of its own
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            env["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
            env["TORCHELASTIC_MAX_RESTARTS"] = str(self.max_restarts)
        elif self.runtime_dir is not None:  # all workers are on this host, and meet in a file
            env["ZRPC_STORE_DIR"] = self.runtime_dir
        if self.max_restarts:
            env["ZRPC_MAX_RESTARTS"] = str(self.max_restarts)
        made = {**{name: base[name] for name in _OF_ONE_MESH if name in base}, **env}
        found = {**base, **env, LAUNCHED: json.dumps(made)}
        if self.elastic:
            found.pop("WORLD_SIZE", None)
        return found
