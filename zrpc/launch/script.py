"""Checks the program that workers should run, before any of them is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
import zipfile

_HEAD_BYTES = 8192
_PYTHON_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")


def check_script(path: str) -> None:
    """Checks that there is such a Python script, as far as that can be seen from outside.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is another program (a binary, or a script of a shell), or a pipe.
    """
    if not os.path.exists(path):
        found = shutil.which(path)
        hint = f"; to run {found}, add --no-python" if found else ""
        raise FileNotFoundError(f"there is no script {path!r} in {os.getcwd()}{hint}")
    in_file = os.path.isfile(path) or os.path.isdir(path)
    if not in_file or path.startswith(("/dev/", "/proc/")):
        raise ValueError(
            f"expected a script that each worker can open, found {path!r}, which only this process "
            "can read: write it to a file first"
        )
    if (kind := _other_kind(path)) is not None:
        raise ValueError(
            f"expected a Python script, but {path!r} is {kind}: to run it as a program, add "
            "--no-python"
        )


def find_program(name: str, search_path: str | None = None) -> list[str]:
    """Returns the first words of a command line that runs a program: found as a shell finds it.

    A file in the working directory needs no ``./``, and a script need not be executable: then what
    its first line names runs it, or else ``/bin/sh``.

    Args:
        name: of the program, or the path of its file.
        search_path: the directories in which to look; None for those of this process's PATH.

    Raises:
        FileNotFoundError: There is no such program.
        ValueError: The file is neither executable nor a script.
    """
    found = shutil.which(name, path=search_path) or shutil.which(os.path.join(os.curdir, name))
    path = found or name
    if not os.path.isfile(path):
        where = f"in {os.getcwd()}" if os.sep in name else f"on the PATH or in {os.getcwd()}"
        raise FileNotFoundError(f"there is no program {name!r} {where}")
    head = _head(path)
    if found and (_interpreter(head) or _is_binary(head)):
        return [found]
    if _is_binary(head):
        raise ValueError(f"expected a program, but {name!r} is not executable: `chmod +x {name}`")
    return [*(_interpreter(head).split(maxsplit=1) or ["/bin/sh"]), path]


def _other_kind(path: str) -> str | None:
    """Returns what a file is instead of a Python script; None if it may be one."""
    # A directory may have a __main__.py. Of a file that can't be read, Python's own error says why.
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        return None
    head = _head(path)
    is_compiled = path.endswith(".pyc") or head.startswith(importlib.util.MAGIC_NUMBER)
    if is_compiled or zipfile.is_zipfile(path):
        return None
    if _is_binary(head):
        return "a binary file"
    suffix, interpreter = os.path.splitext(path)[1], _interpreter(head)
    if interpreter:
        doubtful = "python" not in interpreter
    else:
        doubtful = suffix not in _PYTHON_SUFFIXES and (bool(suffix) or os.access(path, os.X_OK))
    if not doubtful or _compiles(path):
        return None
    return f"a script for {interpreter}" if interpreter else "none"


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b"\0"  # it may still be executable


def _is_binary(head: bytes) -> bool:
    return b"\0" in head


def _interpreter(head: bytes) -> str:
    """Returns what a script's first line names; empty if it names nothing."""
    first = head.partition(b"\n")[0].decode(errors="surrogateescape")
    return first[2:].strip() if first.startswith("#!") else ""


def _compiles(path: str) -> bool:
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(file.read(), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    except (RecursionError, MemoryError):
        return True  # Python's own error says more
    return True
