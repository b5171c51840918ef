"""From a forked copy of the server, or a spawned interpreter, to a process like a fresh one."""

from __future__ import annotations

import importlib.machinery
import io
import os
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Any, TextIO

from . import program
from .task import Task


def become(task: Task, at_startup: Collection[str]) -> None:
    """Run `task` in this process, and return or raise as a fresh interpreter's program would.

    Standard input, output and error are in place already, as descriptors 0 to 2.

    Args:
        task: The program and its surroundings.
        at_startup: Names of the modules that every fresh interpreter has.
    """
    _set_surroundings(task)
    if hidden := _wrongly_preloaded(task, at_startup):
        _start_over(task, hidden)
    _open_standard_streams(task.line_buffered)
    _reseed()
    program.run(task)


def _set_surroundings(task: Task) -> None:
    if task.env is not None and task.env != dict(os.environ):
        os.environ.clear()
        os.environ.update(task.env)
        if hasattr(time, "tzset"):
            time.tzset()
    if task.cwd is not None:
        os.chdir(task.cwd)
    if task.sys_path is not None:
        sys.path[:] = task.sys_path
    # multiprocessing was imported in the server's directory and with its key.
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)


def _wrongly_preloaded(task: Task, at_startup: Collection[str]) -> list[str]:
    """Modules that the server imported, but that the program would find beside itself.

    A script's directory comes first on ``sys.path``: with a ``queue.py`` beside it, ``import
    queue`` means that file, for torch too. No import can be taken back once it has run.
    """
    if task.kind == "function" or getattr(sys.flags, "safe_path", False):
        return []
    first = program.script_directory(task.target) if task.kind == "script" else os.getcwd()
    try:
        beside = {name.partition(".")[0] for name in os.listdir(first)}
    except OSError:
        return []
    preloaded = beside.intersection(sys.modules).difference(at_startup, sys.builtin_module_names)
    return sorted(name for name in preloaded if _differs(name, first))


def _differs(name: str, directory: str) -> bool:
    found = importlib.machinery.PathFinder.find_spec(name, [directory])
    if found is None or not found.has_location or found.origin is None:
        return False
    loaded = getattr(sys.modules[name], "__file__", None)
    return loaded is None or os.path.realpath(loaded) != os.path.realpath(found.origin)


def _start_over(task: Task, hidden: list[str]) -> None:
    """Replace this process by a fresh interpreter, which imports everything anew."""
    sys.stderr.write(
        f"zrpc launch: {', '.join(hidden)} beside the program hides a module that was imported "
        "ahead; starting without imports made ahead (slower)\n"
    )
    sys.stderr.flush()
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if task.line_buffered and "-u" not in options:
        options = [*options, "-u"]
    way = [task.target] if task.kind == "script" else ["-m", task.target]
    os.execv(sys.executable, [sys.executable, *options, *way, *task.argv])


def _open_standard_streams(line_buffered: bool) -> None:
    # The server opened its streams for other files, perhaps a terminal: buffering and encoding
    # errors are decided anew, as at an interpreter's start.
    for fd, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        stream = _text_stream(fd, getattr(sys, f"__{name}__"), line_buffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _text_stream(fd: int, model: TextIO | None, line_buffered: bool) -> TextIO:
    reads = fd == 0
    write_through = isinstance(model, io.TextIOWrapper) and model.write_through  # python -u
    mode = "rb" if reads else "wb"
    buffering = 0 if write_through and not reads else -1
    raw: Any = open(fd, mode, buffering, closefd=False)  # noqa: SIM115
    getattr(raw, "raw", raw).name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    flushes_lines = not reads and (line_buffered or fd == 2 or raw.isatty())
    stream = io.TextIOWrapper(
        raw,
        encoding=model.encoding if model else "utf-8",
        errors=model.errors if model else "backslashreplace" if fd == 2 else "surrogateescape",
        newline=None if reads else "\n",
        line_buffering=flushes_lines and not write_through,
        write_through=write_through,
    )
    stream.mode = "r" if reads else "w"  # type: ignore[misc]
    return stream


def _reseed() -> None:
    """Make random numbers differ between siblings, as they do between fresh interpreters.

    Python's own `random` does so by itself at every fork.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
