"""Command lines that start an interpreter like this one."""

from __future__ import annotations

import _imp
import io
import os
import subprocess
import sys

from zrpc.launch.errors import LaunchError

# The first code of a new process, before any import. It makes this package importable. Neither the
# working directory nor this package's own imports affect the program that runs later there.
_BOOTSTRAP = """\
import sys
startup_modules = frozenset(sys.modules)
if sys.path and not sys.path[0]:
    del sys.path[0]
from importlib.util import find_spec
if find_spec("zrpc") is None:
    sys.path.append({root!r})
{main}
"""


def python_command(main: str) -> list[str]:
    """Returns the command that runs the code ``main`` in an interpreter with the same options.

    The code finds the modules of a fresh interpreter in ``startup_modules``.

    Raises:
        LaunchError: This process doesn't know its interpreter, as when Python is embedded.
    """
    if not sys.executable:
        raise LaunchError("sys.executable is empty: there is no interpreter to start")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [sys.executable, *interpreter_options(), "-c", _BOOTSTRAP.format(root=root, main=main)]


def interpreter_options() -> list[str]:
    """Returns the options of a command line that starts an interpreter like this one.

    The standard library has a function for its own use. It leaves out most of the options ``-X``,
    and those of output, hashes and compiled files.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if "-X" in options:
        del options[options.index("-X") :]  # they come last
    for name, value in sys._xoptions.items():
        options += ["-X", name if value is True else f"{name}={value}"]
    output = sys.__stdout__
    unbuffered = isinstance(output, io.TextIOWrapper) and output.write_through
    if unbuffered and not os.environ.get("PYTHONUNBUFFERED"):  # the other one may have another
        options.append("-u")
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED") == "0":
        options.append("-R")
    if (checked := _imp.check_hash_based_pycs) != "default":
        options += ["--check-hash-based-pycs", checked]
    return options
