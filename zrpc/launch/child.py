"""Turns a forked copy of the server, or a spawned interpreter, into a process like a fresh one."""

from __future__ import annotations

import atexit
import ctypes
import importlib.machinery
import io
import os
import pickle
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, TextIO

from zrpc.launch import program
from zrpc.launch.descriptors import move_descriptors
from zrpc.launch.interpreter import interpreter_options, python_command
from zrpc.launch.script import find_program
from zrpc.launch.signals import SignalState
from zrpc.launch.task import Task
from zrpc.launch.terminal_input import RelayedInput

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# The arguments are passed on by themselves: one of them alone may have a limit of 128 KB.
_BECOME = """\
from zrpc.launch.child import become
from zrpc.launch.task import Task
become({}.within(argv=tuple(sys.argv[1:])), startup_modules, False)
"""
# The modules of the server whose teardown its children skip, by name.
_kept: dict[str, ModuleType] = {}


def become(task: Task, startup_modules: Collection[str], preloaded: bool = True) -> None:
    """Runs `task` in this process, and returns or raises as in a fresh interpreter.

    Standard input, output and error are in place already, as descriptors 0 to 2. Every fresh
    interpreter has the startup modules. ``preloaded`` says whether this one has more than those
    that this package uses.
    """
    _set_environment(task)
    if task.kind == "program":
        _execute(task)
    if hidden := _hidden_modules(task, startup_modules):
        _start_over(task, hidden, preloaded)
    _open_standard_streams(task)
    _reseed()
    program.run(task)


def load_task(
    fd: int,
    parent: int,
    moved: Mapping[int, int],
    startup_modules: Collection[str],
    given: SignalState,
) -> Callable[[], None]:
    """Prepares a new interpreter, started by `parent`, for the task in an open file.

    Returns the program, to be called at the bottom of the stack. The keys of `moved` are
    descriptors, and the values their numbers in the program.
    """
    given.restore()
    die_with_parent(parent)
    with open(fd, "rb") as file:
        task = pickle.load(file)
    move_descriptors(list(moved), list(moved.values()))
    return partial(become, task, startup_modules, False)


def _set_environment(task: Task) -> None:
    if task.env is not None and task.env != dict(os.environ):
        os.environ.clear()
        os.environ.update(task.env)
        time.tzset()
    if task.cwd is not None:
        os.chdir(task.cwd)
    if task.sys_path is not None:
        sys.path[:] = task.sys_path
    # multiprocessing was imported in the server's directory and with its key.
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)


def _execute(task: Task) -> NoReturn:
    """Replaces this process by the program; if that is not possible, exits as a shell does."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these from its start on
        signal.signal(number, signal.SIG_DFL)
    try:
        command = find_program(task.target)
        os.execv(command[0], [*command, *task.argv])
    except (OSError, ValueError) as error:
        sys.stderr.write(f"zrpc launch: {task.target!r} can't be run: {error}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _hidden_modules(task: Task, startup_modules: Collection[str]) -> list[str]:
    """Returns preloaded modules that a file in the program's own directory should hide.

    A script's directory comes first on ``sys.path``: with a ``queue.py`` beside it, ``import
    queue`` means that file, for torch too. An import can't be undone once it has run.
    """
    if task.kind == "function" or sys.flags.safe_path:
        return []
    directory = program.script_directory(task.target) if task.kind == "script" else os.getcwd()
    try:
        names = {name.partition(".")[0] for name in os.listdir(directory)}
    except OSError:
        return []
    names.intersection_update(sys.modules)
    names.difference_update(startup_modules, sys.builtin_module_names)
    return sorted(name for name in names if _differs(name, directory))


def _differs(name: str, directory: str) -> bool:
    found = importlib.machinery.PathFinder.find_spec(name, [directory])
    if found is None or not found.has_location or found.origin is None:
        return False
    loaded = getattr(sys.modules[name], "__file__", None)
    return loaded is None or os.path.realpath(loaded) != os.path.realpath(found.origin)


def _start_over(task: Task, hidden: list[str], preloaded: bool) -> None:
    """Replaces this process by a fresh interpreter, which imports everything itself.

    If even a module that this package uses is hidden, the program is run without this package.
    """
    found = f"zrpc launch: {', '.join(hidden)} beside the program hides a preloaded module; "
    if preloaded:
        _write_note(f"{found}starting without preloaded modules (slower)")
        # The environment and the folder are set already, and no secret is put on a command line.
        same = repr(replace(task, argv=(), env=None, cwd=None))
        os.execv(sys.executable, [*python_command(_BECOME.format(same)), *task.argv])
    lost = "; its errors open no debugger" if task.on_error else ""
    _write_note(f"{found}starting without those that zrpc uses{lost}")
    options = interpreter_options()
    if task.line_buffered and "-u" not in options:
        options = [*options, "-u"]
    program_arguments = [task.target] if task.kind == "script" else ["-m", task.target]
    os.execv(sys.executable, [sys.executable, *options, *program_arguments, *task.argv])


def _write_note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _open_standard_streams(task: Task) -> None:
    # The server opened its streams for other files, perhaps a terminal: buffering and encoding
    # error handling are chosen again, as when an interpreter starts.
    for fd, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        stream = _text_stream(fd, getattr(sys, f"__{name}__"), task)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _text_stream(fd: int, model: TextIO | None, task: Task) -> TextIO:
    is_input = fd == 0
    write_through = isinstance(model, io.TextIOWrapper) and model.write_through  # python -u
    mode = "rb" if is_input else "wb"
    buffering = 0 if write_through and not is_input else -1
    raw: Any
    if is_input and task.relayed_input:
        raw = io.BufferedReader(RelayedInput(fd, mode, closefd=False))
    else:
        raw = open(fd, mode, buffering, closefd=False)  # noqa: SIM115
    getattr(raw, "raw", raw).name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    flushes_lines = not is_input and (task.line_buffered or fd == 2 or raw.isatty())
    stream = io.TextIOWrapper(
        raw,
        encoding=model.encoding if model else "utf-8",
        errors=model.errors if model else "backslashreplace" if fd == 2 else "surrogateescape",
        newline=None if is_input else "\n",
        line_buffering=flushes_lines and not write_through,
        write_through=write_through,
    )
    stream.mode = "r" if is_input else "w"  # type: ignore[misc]
    return stream


def _reseed() -> None:
    """Makes random numbers differ between siblings, as they do between fresh interpreters.

    Python reseeds its own `random` at every fork.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that forked it ends.

    If that parent is already gone, its death signal was missed, so this process exits here.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process, in place of init, the parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def skip_destructors() -> None:
    """Lets children exit without the destructors of the C++ libraries that are loaded by now.

    Freeing an object writes to it, and so copies the memory around it, which a child shares with
    the server. torch's destructors would take it a third of a second of processor time. All
    that Python does at its exit comes before; libraries that are loaded later clean up, too.
    """
    libc = ctypes.CDLL(None)
    try:
        flush, skip = libc.fflush, libc._exit
        # C's exit() calls these in the reverse order: one with NULL, the other with the exit code.
        libc.on_exit(skip, None)
        libc.__cxa_atexit(flush, None, None)
    except AttributeError:
        pass  # another C library than glibc


def skip_teardown(startup_modules: Collection[str]) -> None:
    """Lets children exit without the teardown of the modules that are loaded by now.

    Python frees its modules at its exit, object by object, and torch takes each of its operators'
    kernels back. As in `skip_destructors`, each of these is a write: it would take a child a tenth
    of a second of processor time. What the child's program has made and imported is torn down, and
    what it has registered to be called at the exit is called.
    """
    _kept.update((n, m) for n, m in sys.modules.items() if n not in startup_modules)
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[1].__module__ == "torch.library":
            finalizer.atexit = False


@atexit.register  # before anything that is preloaded registers something, so that it is called last
def keep_modules() -> None:
    """Hides modules from the interpreter's teardown, and keeps them alive."""
    names = [name for name, module in _kept.items() if sys.modules.get(name) is module]
    for name in names:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept[name]))
    # In one step, without bytecode: a daemon thread that imports one of them meanwhile would find
    # only some, and run others again.
    deque(map(sys.modules.pop, names), maxlen=0)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {argument}): {os.strerror(number)}")
