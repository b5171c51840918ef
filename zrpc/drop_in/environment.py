"""How the drop-in reaches the Python processes that a program starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# It holds nothing but a `sitecustomize.py`, which Python imports at its start.
_STARTUP_DIRECTORY = str(Path(__file__).parent / "startup")


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns ``env`` whose ``PYTHONPATH`` makes Python processes install the drop-in.

    Their own Python children inherit it. It has no effect on Python started with ``-I``, ``-E`` or
    ``-S``, nor on an interpreter that doesn't have zrpc.

    Example:
        >>> child_environment({"PYTHONPATH": "/mine"})["PYTHONPATH"].endswith("startup:/mine")
        True
    """
    # An empty entry would mean the working directory.
    before = [path for path in [env.get("PYTHONPATH")] if path]
    if before and _STARTUP_DIRECTORY in before[0].split(os.pathsep):
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join([_STARTUP_DIRECTORY, *before])}
