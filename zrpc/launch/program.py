"""Runs a task as the main program of this process, as a fresh interpreter would.

Every function here returns or raises: the interpreter then exits as it always does, with its exit
code, its traceback, its exit handlers and its wait for threads.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pickle
import pkgutil
import runpy
import sys
from types import CodeType, ModuleType, TracebackType

from zrpc.launch.task import Task


def run(task: Task) -> None:
    """Runs `task` as ``__main__``, and returns or raises as it does.

    Must be called at the very bottom of the stack. An error's traceback is shown without the
    frames of this package.
    """
    try:
        if task.kind == "script":
            _run_script(task)
        elif task.kind == "module":
            _run_module(task)
        else:  # another program has replaced this process already
            _run_function(task)
    except BaseException:
        _hide_our_frames(task.on_error)
        raise


def _run_script(task: Task) -> None:
    path = task.target
    _set_arguments(path, task.argv, [path])
    if _is_bundle(path):  # a directory or zip file with a __main__.py
        _set_main(ModuleType("__main__"))
        sys.path.insert(0, os.path.abspath(path))
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, script_directory(path))
    main = ModuleType("__main__")
    absolute = os.path.abspath(path)
    main.__file__ = absolute
    vars(main).update(__cached__=None)
    if sys.version_info < (3, 14):  # newer ones create them on first use
        vars(main).update(__annotations__={})
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", absolute)
    _set_main(main)
    exec(_code_of(path, absolute), main.__dict__)


def _run_module(task: Task) -> None:
    _set_arguments("-m", task.argv, ["-m", task.target])  # runpy replaces "-m" by the path
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _set_main(ModuleType("__main__"))
    runpy._run_module_as_main(task.target)  # type: ignore[attr-defined]


def _run_function(task: Task) -> None:
    _set_arguments("", task.argv, [])
    _set_main(ModuleType("__main__"))
    function = pkgutil.resolve_name(task.target)
    args, kwargs = pickle.loads(task.payload)
    sys.exit(function(*args, **kwargs))


def _set_arguments(name: str, argv: tuple[str, ...], program: list[str]) -> None:
    sys.argv = [name, *argv]
    sys.orig_argv = [sys.executable, *program, *argv]


def _set_main(main: ModuleType) -> None:
    # Like the interpreter's own, and kept in sys.modules, so that functions and classes defined
    # in it pickle by name and multiprocessing's spawn finds the file again.
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def script_directory(path: str) -> str:
    """Returns ``sys.path[0]`` for the script `path`, with links followed."""
    return os.path.dirname(os.path.realpath(path))


def _is_bundle(path: str) -> bool:
    if os.path.isdir(path):
        return True
    finder = pkgutil.get_importer(path)
    return finder is not None and not isinstance(finder, importlib.machinery.FileFinder)


def _code_of(path: str, shown: str) -> CodeType:
    with io.open_code(path) as file:
        compiled: CodeType | None = pkgutil.read_code(file)  # a .pyc file
    if compiled is not None:
        return compiled
    with io.open_code(path) as file:
        return compile(file.read(), shown, "exec")


def _hide_our_frames(on_error: str) -> None:
    """Shows the error being raised as if the user's code were at the bottom of the stack.

    Then calls what ``on_error`` names with it, if anything.

    The hook is installed only while the interpreter reports that one error. KeyboardInterrupt
    and SystemExit thus keep their effects: death by SIGINT, the exit code.
    """
    hook = getattr(sys, "excepthook", sys.__excepthook__)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and trace.tb_frame.f_globals is not globals():
            trace = trace.tb_next
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.last_traceback = trace
        hook(kind, error.with_traceback(trace), trace)
        if on_error:
            pkgutil.resolve_name(on_error)(error)

    sys.excepthook = show
