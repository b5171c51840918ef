"""The options with which this interpreter was started, for another one."""

from __future__ import annotations

import _imp
import io
import os
import subprocess
import sys

__all__ = ["interpreter_options"]


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
