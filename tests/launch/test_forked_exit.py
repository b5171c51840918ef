"""How a forked process exits: as any does, but for what it shares with its server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Write
from zrpc.launch import Starter, Task

pytestmark = pytest.mark.system

DEADLINE = 30.0
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
# What a program prints at its exit.
PROGRAMS = {
    # What is shared with the server is left alone.
    "import library; print(1)": ["1"],
    "import library; own = library.Object('an own object is freed')": ["an own object is freed"],
    # Exit handlers find the server's modules.
    """
    import atexit, library, weakref
    atexit.register(library.watch)
    weakref.finalize(library.shared, print, "a finalizer runs", flush=True)
    """: ["an exit handler runs True", "a finalizer runs"],
    # So does an object of the program, to the end.
    """
    import library, sys
    class Last:
        def __del__(self):
            print(library.shared.text, sys.modules is None, flush=True)
    last = Last()
    """: ["an object of the shared module is freed False"],
    # The program's own libraries clean up.
    """
    import library
    library.load(b"destructor of another library")
    """: ["destructor of another library"],
    # C writes its buffers.
    """
    import ctypes
    from library import libc
    libc.malloc.restype = ctypes.c_void_p
    stream = ctypes.c_void_p.in_dll(libc, "stdout")
    libc.setvbuf(stream, ctypes.c_void_p(libc.malloc(4096)), 0, 4096)  # written when full
    libc.printf(b"C's buffer is written\\n")
    """: ["C's buffer is written"],
    # torch's operators are not taken back: that is what takes most of the time, and no effect of
    # it is left when the process ends.
    """
    import weakref
    finalizers = [f for f in weakref.finalize._registry if "librar" in f.peek()[1].__name__]
    print(len(finalizers) > 0, any(f.atexit for f in finalizers))
    """: ["True False"],
}


def test_a_forked_exit_spares_what_is_shared(write: Write, tmp_path: Path, marked: Any) -> None:
    write(LIBRARY, "lib/library.py")
    env = {**marked.env, "PYTHONPATH": str(tmp_path / "lib")}
    with Starter(preload=["library", "torch"], env=env) as server:
        for source, expected in PROGRAMS.items():
            with (tmp_path / "out").open("w") as file:
                pid = server.spawn(Task.script(write(source)), stdout=file.fileno())
            assert server.wait(pid, DEADLINE) == 0, source
            assert (tmp_path / "out").read_text().splitlines() == expected, source
