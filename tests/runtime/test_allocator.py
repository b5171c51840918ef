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
import torch
from zrpc.runtime.allocator import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({ROUNDS}):
        [torch.ones({BLOCK}, dtype=torch.uint8) for _ in range({COUNT})]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def work():
    if sys.argv[1] == "keep":
        keep_freed_memory()
    print(new_pages())

# In two threads at once, since malloc deals with each of them apart.
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
"""


def new_pages(what: str, **env: str) -> list[int]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    plain.update(env, OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", SCRIPT, what]
    done = subprocess.run(command, env=plain, check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def all_pages() -> int:
    return ROUNDS * COUNT * BLOCK // os.sysconf("SC_PAGESIZE")


def test_freed_blocks_are_reused() -> None:
    assert max(new_pages("keep")) < all_pages() / 10


def test_freed_blocks_are_not_reused_by_default() -> None:
    assert max(new_pages("leave")) > all_pages() / 2


def test_the_environment_takes_precedence() -> None:
    assert min(new_pages("keep", MALLOC_MMAP_THRESHOLD_="131072")) >= all_pages()
