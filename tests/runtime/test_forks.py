"""Locks that a process has only once, and a forked child that lacks the thread which held one."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import zrpc
from tests.support.forks import exit_code, fork
from tests.support.waiting import SOON
from zrpc.runtime.interrupts import UninterruptedLock

LOCKS = type(threading.Lock()), type(threading.RLock()), threading.Condition, UninterruptedLock
# Their main programs run when they are imported.
PROGRAMS = "__main__"


def names_of_locks() -> Iterator[tuple[str, ...]]:
    """Yields the module, and the names in it, of each lock of a module or of a class."""
    for module in [each for name, each in sys.modules.items() if f"{name}.".startswith("zrpc.")]:
        for name, value in vars(module).items():
            if isinstance(value, LOCKS):
                yield module.__name__, name
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, held in vars(value).items():
                    if isinstance(held, LOCKS):
                        yield module.__name__, name, attribute


def lock_of(module: str, *names: str) -> Any:
    found: Any = sys.modules[module]
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.system
def test_all_locks_of_modules_are_free_in_a_forked_child() -> None:
    for module in pkgutil.walk_packages(zrpc.__path__, "zrpc."):
        if "bench" not in module.name and not module.name.endswith(PROGRAMS):
            # A module of zrpc.integrations raises this if its extra is not installed.
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    locks = {id(lock_of(*each)): each for each in names_of_locks() if "bench" not in each[0]}
    names = list(locks.values())  # each lock once, though several modules may have its name
    assert len(names) > 5
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for each in names:
                stack.enter_context(lock_of(*each))
            held.set()
            done.wait(SOON)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(SOON)

    def take_all() -> int:
        for each in names:
            print("taking", *each, file=sys.stderr, flush=True)
            with lock_of(*each):  # in this thread: a new one might have the holder's ident
                pass
        return 3

    try:
        assert exit_code(fork(take_all)) == 3
    finally:
        done.set()
        thread.join(SOON)
