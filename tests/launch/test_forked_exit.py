"""How a forked process exits: as any does, but for what it shares with its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zrpc.launch import Task
from zrpc.launch.starter import Starter

pytestmark = pytest.mark.system

DEADLINE = 30.0
Write = Callable[..., str]
Run = Callable[[str], tuple[int, list[str]]]
# What a C++ library does for the destructor of a static object.
LIBRARY = """
import ctypes

libc = ctypes.CDLL(None)

libc.strdup.restype = ctypes.c_void_p

def load(name):
    libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(name)), None)

load(b"destructor of the shared library")

class Object:
    def __init__(self, text):
        self.text = text

    def __del__(self):
        print(self.text, flush=True)

shared = Object("an object of the shared module is freed")

def watch():
    import library
    print("an exit handler runs", library.shared is shared, flush=True)
"""


@pytest.fixture
def run(write: Write, tmp_path: Path, marked: Any) -> Iterator[Run]:
    """Returns a function that runs a program; it returns its exit code and its output's lines."""
    write(LIBRARY, "lib/library.py")
    env = {**marked.env, "PYTHONPATH": str(tmp_path / "lib")}
    out = tmp_path / "out"
    with Starter(preload=["library"], env=env) as server:

        def run(source: str) -> tuple[int, list[str]]:
            with out.open("w") as file:
                pid = server.spawn(Task.script(write(source)), stdout=file.fileno())
                return server.wait(pid, DEADLINE), out.read_text().splitlines()

        yield run


def test_libraries_of_the_server_are_left_alone(run: Run) -> None:
    assert run("import library; print(1)") == (0, ["1"])


def test_modules_of_the_server_are_left_alone(run: Run) -> None:
    assert run("import library; own = library.Object('an own object is freed')") == (
        0,
        ["an own object is freed"],
    )


def test_exit_handlers_find_the_modules_of_the_server(run: Run) -> None:
    source = """
        import atexit, library, weakref
        atexit.register(library.watch)
        weakref.finalize(library.shared, print, "a finalizer runs", flush=True)
        """
    assert run(source) == (0, ["a finalizer runs", "an exit handler runs True"])


def test_an_object_of_the_program_may_use_modules_of_the_server_to_the_end(run: Run) -> None:
    source = """
        import library, sys
        class Last:
            def __del__(self):
                print(library.shared.text, sys.modules is None, flush=True)
        last = Last()
        """
    assert run(source) == (0, ["an object of the shared module is freed False"])


def test_operators_of_torch_are_not_taken_back_at_the_exit(
    write: Write, tmp_path: Path, marked: Any
) -> None:
    """That is what takes most of the time, and no effect of it is left when the process ends."""
    source = """
        import weakref
        finalizers = [f for f in weakref.finalize._registry if "librar" in f.peek()[1].__name__]
        print(len(finalizers) > 0, any(f.atexit for f in finalizers))
        """
    out = tmp_path / "out"
    with Starter(preload=["torch"], env=marked.env) as server, out.open("w") as file:
        pid = server.spawn(Task.script(write(source)), stdout=file.fileno())
        assert server.wait(pid, DEADLINE) == 0
    assert out.read_text() == "True False\n"


def test_libraries_of_the_program_clean_up(run: Run) -> None:
    source = """
        import library
        library.load(b"destructor of another library")
        """
    assert run(source) == (0, ["destructor of another library"])


def test_all_else_happens_as_at_any_exit(run: Run) -> None:
    source = """
        import atexit, ctypes, threading
        import library
        libc, main = library.libc, threading.main_thread()

        def work():
            main.join()  # until the program has ended
            print("the thread has ended", flush=True)

        class Object:
            def __del__(self):
                print("the object is freed", flush=True)

        kept = Object()
        atexit.register(lambda: print("the exit handler runs", flush=True))
        threading.Thread(target=work).start()
        libc.malloc.restype = ctypes.c_void_p
        stream = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stream, ctypes.c_void_p(libc.malloc(4096)), 0, 4096)  # written when full
        libc.printf(b"C's buffer is written\\n")
        """
    expected = [
        "the thread has ended",
        "the exit handler runs",
        "the object is freed",
        "C's buffer is written",
    ]
    assert run(source) == (0, expected)


def test_the_exit_code(run: Run) -> None:
    assert run("raise SystemExit(7)") == (7, [])
