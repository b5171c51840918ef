"""Choosing how processes start: forked from a warm server, or spawned one by one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from .starter import DEFAULT_PRELOAD, Starter

METHODS = ("fork", "spawn")
VARIABLE = "ZRPC_START_METHOD"


def start_method(wanted: str | None = None) -> str:
    """The start method to use.

    Args:
        wanted: ``fork`` or ``spawn``; None for what the environment variable
            ``ZRPC_START_METHOD`` says, or else for what suits the system: fork on Linux, spawn
            elsewhere (Windows has no fork, and macOS's system libraries don't survive it).

    Raises:
        ValueError: There is no such method, or not on this system.
    """
    method = wanted or os.environ.get(VARIABLE) or ("fork" if sys.platform == "linux" else "spawn")
    if method not in METHODS:
        raise ValueError(f"expected one of {METHODS} as the start method, but got {method!r}")
    if method == "fork" and sys.platform != "linux":
        raise ValueError(f"the start method 'fork' needs Linux, but this is {sys.platform}")
    return method


def make_starter(
    wanted: str | None = None,
    *,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    env: Mapping[str, str] | None = None,
    sys_path: Sequence[str] | None = None,
) -> Starter:
    """A starter by the method `wanted` (see `start_method`); enter it to start it.

    Args:
        wanted: The start method.
        preload: Modules that a fork server imports ahead.
        env: Environment of the processes; None for a copy of this process's.
        sys_path: ``sys.path`` of the processes; None for what a fresh interpreter has.
    """
    if start_method(wanted) == "fork":
        from .forkserver import ForkServer  # only importable on Linux

        return ForkServer(preload=preload, env=env, sys_path=sys_path)
    from .spawner import SpawnServer

    return SpawnServer(env=env, sys_path=sys_path)
