"""Scripts behave as under ``python script.py``: each is run both ways and compared."""

from __future__ import annotations

import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Write
from zrpc.launch import Starter, Task
from zrpc.launch.interpreter import interpreter_options

DEADLINE = 30.0

SCRIPTS = {
    "main module": """
        import sys
        main = sys.modules["__main__"]
        assert main.__dict__ is globals()
        unnamed = "builtins", "loader"
        names = {k: v for k, v in globals().items() if k.startswith("__")}
        print(sorted((k, repr(v)) for k, v in names.items() if k[2:-2] not in unnamed))
        print(type(__builtins__), type(__loader__), __loader__.path)
        print(__loader__.get_source("__main__")[:9])
        print(sys.argv, sys.path, sys.orig_argv[1:])
        if __name__ == "__main__":
            print("main")
        """,
    "streams": """
        import sys
        for s in sys.stdin, sys.stdout, sys.stderr:
            print(s.name, s.mode, s.encoding, s.errors, s.isatty(), s.fileno(), s.newlines)
            print(s.line_buffering, s.write_through, type(s.buffer), s.buffer.name)
        assert sys.stdout is sys.__stdout__
        print("€ \\udc80")
        """,
    "chained errors": """
        try:
            {}["x"]
        except KeyError as error:
            raise RuntimeError("outer") from error
        """,
    "error group": "raise OSError(2, 'a' * 50, __file__)",
    "syntax error": "print('never'\n",
    "exit with a text": "import sys; sys.exit('the text')",
    "abrupt exit": "import os; print('lost'); os._exit(4)",
    "keyboard interrupt": "import os, signal, time; os.kill(os.getpid(), 2); time.sleep(9)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "exit handlers": """
        import atexit, sys
        atexit.register(print, "at exit")
        sys.stdout.write("no newline ")
        raise KeyError(1)
        """,
    "threads are joined": """
        import threading, time
        def late():
            threading.main_thread().join()
            print("late")
        threading.Thread(target=late).start()
        print("early")
        """,
    "own excepthook": """
        import sys
        def hook(kind, error, trace):
            print("hook", kind, trace.tb_frame.f_code.co_name, sys.excepthook is hook)
            print(sys.last_value is error, sys.last_traceback is trace)
        sys.excepthook = hook
        1 / 0
        """,
    "functions pickle by name": """
        import pickle
        class A:
            def f(self): return 5
        def g(): return A()
        assert b"__main__" in pickle.dumps(g)
        print(pickle.loads(pickle.dumps(g))().f(), pickle.loads(pickle.dumps(A())).f())
        """,
    "multiprocessing by spawn": """
        import multiprocessing as mp
        def f(x): return x * x, __name__
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(2) as pool:
                print(pool.map(f, range(4)))
        """,
    "relative paths": """
        import os, beside
        print(os.getcwd(), beside.__file__)
        """,
    "signals": """
        import signal, threading
        print([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)])
        print(threading.current_thread() is threading.main_thread(), threading.active_count())
        """,
    "warnings point at the script": "import warnings; warnings.warn('w')",
}


Outcome = tuple[int, str, str]


def text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def under_python(arguments: list[str], cwd: Path, env: dict[str, str]) -> Outcome:
    if "-u" in interpreter_options():  # of pytest-xdist's processes, and so of the starter's
        env = {**env, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE,
        start_new_session=True,
    )
    return done.returncode, text(done.stdout), text(done.stderr)


def under_starter(starter: Starter, task: Task, cwd: Path) -> Outcome:
    out, err = cwd.parent / "out", cwd.parent / "err"
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        pid = starter.spawn(
            task.within(cwd=str(cwd)), stdout=stdout.fileno(), stderr=stderr.fileno()
        )
        code = starter.wait(pid, DEADLINE)
    return code, text(out.read_bytes()), text(err.read_bytes())


@pytest.fixture
def place(tmp_path: Path, write: Write) -> Path:
    write("", "work/beside.py")
    return tmp_path / "work"


def test_script_behaves_as_under_python(write: Write, place: Path, marked: Any) -> None:
    task = Task.script("script.py", ["a", "--b=1"])
    with (
        Starter("fork", preload=(), env=marked.env) as forks,
        Starter("spawn", env=marked.env) as spawns,
    ):
        for name, source in SCRIPTS.items():
            write(source, "work/script.py")
            expected = under_python(["script.py", "a", "--b=1"], place, marked.env)
            for starter in forks, spawns:
                assert under_starter(starter, task, place) == expected, name
    write(SCRIPTS["streams"], "work/script.py")
    env = {**marked.env, "PYTHONUNBUFFERED": "1"}
    expected = under_python(["script.py"], place, env)
    with Starter("fork", preload=(), env=env) as forks:
        assert under_starter(forks, Task.script("script.py"), place) == expected


def test_targets_of_other_kinds_behave_as_under_python(
    starter: Starter, write: Write, place: Path, marked: Any
) -> None:
    """A link, a script in another encoding, a directory, an archive, and a compiled file."""
    source = write("import beside, sys; print(sys.argv, sys.path[0], __name__); 1 / 0", "m.py")
    write(Path(source).read_text(), "work/script.py")
    write(Path(source).read_text(), "work/app/__main__.py")
    write("", "work/app/beside.py")
    (place / "link").mkdir()
    (place / "link" / "link.py").symlink_to("../script.py")
    (place / "latin.py").write_bytes("# coding: latin-1\nprint('é')\n".encode("latin-1"))
    with zipfile.ZipFile(place / "app.zip", "w") as archive:
        archive.write(source, "__main__.py")
        archive.write(place / "beside.py", "beside.py")
    py_compile.compile(source, str(place / "compiled.pyc"))
    for target in ("link/link.py", "latin.py", "app", "app.zip", "compiled.pyc"):
        code, out, err = under_python([target, "x"], place, marked.env)
        assert code == (target != "latin.py")
        if target == "compiled.pyc":  # a traceback names the file that was compiled
            err = err.replace("compiled.pyc", "m.py")
        assert under_starter(starter, Task.script(target, ["x"]), place) == (code, out, err), target


MODULE = """
    import sys, pickle
    from . import part
    def f(): pass
    print(sys.argv, sys.path, sys.orig_argv[1:], __name__, __package__, __spec__.name, __file__)
    print(pickle.loads(pickle.dumps(f)) is f)
    import multiprocessing as mp
    if __name__ == "__main__":
        process = mp.get_context("spawn").Process(target=f)
        process.start(); process.join(); print(process.exitcode)
        1 / 0
    """


def test_module_behaves_as_under_python(
    starter: Starter, write: Write, place: Path, marked: Any
) -> None:
    write("", "work/pack/__init__.py")
    write("", "work/pack/part.py")
    write("import no_such_thing", "work/pack/broken.py")
    write(MODULE, "work/pack/tool.py")
    write(MODULE, "work/pack/__main__.py")
    for module in "pack.tool", "pack", "pack.no_such", "no_such", "pack.broken":
        expected = under_python(["-m", module, "a", "-m"], place, marked.env)
        assert under_starter(starter, Task.module(module, ["a", "-m"]), place) == expected


def test_error_in_a_function_shows_no_frames_of_zrpc(starter: Starter, place: Path) -> None:
    code, _, err = under_starter(starter, Task.function("json:loads", "{"), place)
    assert code == 1
    assert err.startswith('Traceback (most recent call last):\n  File "')
    assert "zrpc" not in err
    assert "json.decoder.JSONDecodeError" in err
