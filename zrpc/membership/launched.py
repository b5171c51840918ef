"""The variables of a launcher: for which worker and which mesh they were made.

Processes inherit the variables of a worker. Most of these are the worker itself, such as a program
that a shell script has started. But a worker may also start others: another launcher, or the
workers of a mesh of their own. So `zrpc launch` says in one variable what it has set. What is still
as it was set counts only for the rank and the mesh that it was made for.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from zrpc.errors import RendezvousError
from zrpc.membership.missing_ranks import rank_ranges

# Holds all variables that the launcher has set for a worker, as JSON.
LAUNCHED = "ZRPC_LAUNCHED"
# torchrun sets this variable, and `zrpc launch` doesn't.
_TORCHRUNS = "TORCHELASTIC_RUN_ID"
_LOOPBACK = ("localhost", "127.0.0.1")
_RUNTIME_DIRECTORY = "ZRPC_RUNTIME_DIR"
# Written there by zrpc.launch. A note is empty while it is being written.
_STOP_NOTE = "launch-stops"
_ENDED_NOTE = "launch-ended"
# While this process itself has launched workers and waits to meet them.
_own_directory = ""
# What the processes that `zrpc.spawn` has started here were told of their mesh, while they run.
_spawned: Mapping[str, str] = {}


@dataclass(frozen=True)
class Launched:
    """What a launcher has set for one worker.

    Attributes:
        variables: the environment now.
        made: the variables as the launcher has set them; empty if there was no such launcher.
    """

    variables: Mapping[str, str]
    made: Mapping[str, str] = field(default_factory=dict)

    def is_at(self, address: tuple[str, int] | None) -> bool:
        """Whether a mesh that meets at this address may be the launcher's."""
        if not self.made:
            return True
        made = _host(self.made.get("MASTER_ADDR", "")), self.made.get("MASTER_PORT")
        return address is not None and (_host(address[0]), str(address[1])) == made

    def is_mesh(self, address: tuple[str, int] | None, world_size: int | None) -> bool:
        """Whether a mesh may be the launcher's."""
        return not self.made or (self.has_size(world_size) and self.is_at(address))

    def has_size(self, world_size: int | None) -> bool:
        """Whether a mesh is as large as the launcher's."""
        size = None if world_size is None else str(world_size)
        return size == self.made.get("WORLD_SIZE")

    def is_worker(
        self, address: tuple[str, int] | None, world_size: int | None, rank: int | None
    ) -> bool:
        """Whether a worker of a mesh may be the one that the variables were made for."""
        is_rank = not self.made or self.made.get("RANK") == str(rank)
        return is_rank and self.is_mesh(address, world_size)

    def get(self, name: str, made_for_this: bool) -> str:
        """Returns a variable; nothing if it is the launcher's and was made for another purpose."""
        value = self.variables.get(name, "")
        if made_for_this or self.made.get(name) != value:
            return value
        of_torchrun = name.startswith("TORCHELASTIC_") and self.variables.get(_TORCHRUNS)
        return value if of_torchrun else ""


def launched(variables: Mapping[str, str] = os.environ) -> Launched:
    """Returns what a launcher has set in an environment."""
    try:
        made = json.loads(variables.get(LAUNCHED, "{}"))
    except ValueError:
        made = {}
    return Launched(variables, made)


@contextlib.contextmanager
def launching(directory: str) -> Iterator[None]:
    """Lets `stop_error` find notes in a directory for a ``with`` statement in this process."""
    global _own_directory
    _own_directory = directory
    try:
        yield
    finally:
        _own_directory = ""


def set_spawned(variables: Mapping[str, str]) -> None:
    """Sets what this process needs to join those that it has spawned last."""
    global _spawned
    _spawned = variables


def unset_spawned(variables: Mapping[str, str]) -> None:
    """Removes what was set when these were spawned; not if others were spawned since."""
    if _spawned is variables:
        set_spawned({})


def own_environment() -> dict[str, str]:
    """Returns the environment, and what only the processes that were spawned here were told."""
    return {**_spawned, **os.environ}


def stop_error() -> RendezvousError | None:
    """Returns why the launcher stops all workers; None if none does.

    For workers that still wait to meet the others: one that handles SIGTERM would otherwise wait
    for workers that have exited.
    """
    reason = _note(_STOP_NOTE)
    return RendezvousError(f"the launcher stops all workers: {reason}") if reason else None


def ended_error(awaited: Iterable[int], rank: int, world_size: int) -> RendezvousError | None:
    """Returns the error for ranks that can't come any more; None if all may.

    The launcher doesn't start workers again that have ended with exit code 0.

    Args:
        awaited: the ranks that have not come.
        rank: this worker's. If it is not the launcher's, the mesh is one of other processes.
        world_size: as ``rank``.
    """
    ended = set(awaited).intersection(map(int, _note(_ENDED_NOTE).split()))
    if not ended:
        return None
    of_launch = launched()
    if of_launch.made.get("RANK") != str(rank) or not of_launch.has_size(world_size):
        return None
    have = "ranks {} have" if len(ended) > 1 else "rank {} has"
    return RendezvousError(
        f"expected {world_size} workers, but {have.format(rank_ranges(ended))} ended with exit "
        "code 0 and will not join this mesh: all ranks must call init_rpc equally often"
    )


def _note(name: str) -> str:
    """Returns what the launcher has noted; empty if nothing."""
    directory = _own_directory or os.environ.get(_RUNTIME_DIRECTORY)
    if directory:
        with contextlib.suppress(OSError), open(os.path.join(directory, name)) as file:
            return file.read()
    return ""


def _host(name: str) -> str:
    return _LOOPBACK[1] if name in _LOOPBACK else name
