"""How a forked process exits: as any does, but for the libraries that it shares with its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zrpc.launch import Task
from zrpc.launch.forkserver import ForkServer

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
"""


@pytest.fixture
def run(write: Write, tmp_path: Path, marked: Any) -> Iterator[Run]:
    """Returns a function that runs a program; it returns its exit code and its output's lines."""
    write(LIBRARY, "lib/library.py")
    env = {**marked.env, "PYTHONPATH": str(tmp_path / "lib")}
    out = tmp_path / "out"
    with ForkServer(preload=["library"], env=env) as server:

        def run(source: str) -> tuple[int, list[str]]:
            with out.open("w") as file:
                pid = server.spawn(Task.script(write(source)), stdout=file.fileno())
                return server.wait(pid, DEADLINE), out.read_text().splitlines()

        yield run


def test_libraries_of_the_server_are_left_alone(run: Run) -> None:
    assert run("import library; print(1)") == (0, ["1"])


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
