"""Freed memory is reused, and not returned to the system each time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

ROUNDS = 50
# The number of blocks at a time, and their size in bytes.
COUNT = 10
BLOCK = 1 << 20

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the threshold is of glibc's malloc"
)

# Prints the number of new pages while blocks were made, filled and freed one after the other.
SCRIPT = f"""
import resource, sys, threading
from zrpc.runtime.allocator import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({ROUNDS}):
        [block() for _ in range({COUNT})]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def work(what):
    if what == "keep":
        keep_freed_memory()
    print(new_pages())

def block():
    return b"1" * {BLOCK}

for what in sys.argv[1:]:
    # In two threads, since malloc deals with each of them apart.
    for _ in range(2):
        thread = threading.Thread(target=work, args=[what])
        thread.start()
        thread.join()
"""


def new_pages(*what: str, **env: str) -> list[int]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    plain.update(env)
    command = [sys.executable, "-c", SCRIPT, *what]
    done = subprocess.run(command, env=plain, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def all_pages() -> int:
    return ROUNDS * COUNT * BLOCK // os.sysconf("SC_PAGESIZE")


def test_freed_blocks_are_reused_but_not_by_default() -> None:
    first, second, *kept = new_pages("leave", "keep")
    assert max(first, second) > all_pages() / 2
    assert max(kept) < all_pages() / 10


def test_the_environment_takes_precedence() -> None:
    assert min(new_pages("keep", MALLOC_MMAP_THRESHOLD_="131072")) >= all_pages()
