"""The command line of a new Python process like this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from .errors import LaunchError

# What `python -c` runs first, before any import, so that neither the working directory nor this
# package's own imports get in the way of the program that runs later in the process.
BOOTSTRAP = """\
import sys
at_startup = frozenset(sys.modules)
if sys.path and not sys.path[0]:
    del sys.path[0]
{path}
{main}
"""
_FIND_ZRPC = """\
from importlib.machinery import PathFinder
from importlib.util import find_spec
if find_spec("zrpc") is None:
    sys.path.append({root!r})
"""


def interpreter() -> list[str]:
    """The interpreter with the options that this one was started with.

    Raises:
        LaunchError: This process doesn't know its interpreter, as when Python is embedded.
    """
    if not sys.executable:
        raise LaunchError("sys.executable is empty: there is no interpreter to start")
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options]


def find_zrpc(sys_path: Sequence[str] | None) -> str:
    """Code that makes this package importable.

    Args:
        sys_path: The whole ``sys.path``; None to keep a fresh interpreter's, and to add to its
            end only if the package would not be found.
    """
    if sys_path is not None:
        return f"sys.path[:] = {list(sys_path)!r}"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return _FIND_ZRPC.format(root=root)
