"""Functions by value that come back to the process that has defined them."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import zrpc
from tests.support.forks import exit_code, fork
from zrpc.testing import Mesh
from zrpc.wire.pickling import dumps


def copied(function: Any) -> Any:
    return pickle.loads(dumps(function))


def make_counter() -> Callable[[], int]:
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    return add


def test_a_copy_that_comes_back_is_the_original() -> None:
    add = make_counter()
    copy = copied(add)
    assert copy is not add
    assert copy() == add() == 1
    assert copied(copy) is add
    assert copied(copied(copy)) is not add  # of the original, which has travelled once more
    assert add() == 2


def test_what_comes_back_changes_nothing_at_home() -> None:
    add = make_counter()
    add.note = "before"  # type: ignore[attr-defined]
    body = dumps(copied(add))
    add.note = "after"  # type: ignore[attr-defined]
    add()
    assert pickle.loads(body).note == "after"
    assert add() == 2


def test_a_copy_whose_original_is_gone_has_the_globals_of_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = types.ModuleType("cell")
    exec("total = 1\ndef get():\n    return total", vars(cell))
    copy = copied(cell.get)  # while it can't be imported
    monkeypatch.setitem(sys.modules, "cell", cell)
    del cell.get
    assert copied(copy)() == 1

    exec("def get():\n    return total", vars(cell))
    get = cell.get
    get.__qualname__ = "<locals>.get"  # can't be found by name
    copy = copied(get)
    del cell.get, get
    cell.total = 2
    assert copy() == 1
    assert copied(copy)() == 2


@pytest.mark.system
def test_a_forked_child_is_not_the_home_of_its_parents_functions() -> None:
    add = make_counter()
    body = dumps(copied(add))
    assert exit_code(fork(lambda: pickle.loads(body) is add)) == 0


@pytest.mark.zrpc(processes=True, workers=3)
def test_a_callback_by_way_of_other_workers_runs_on_the_caller_itself(mesh: Mesh) -> None:
    def call() -> tuple[list[int], bool]:
        found: list[int] = []

        def tell(value: int) -> None:
            found.append(value)

        def relay(function: Any, names: list[str]) -> Any:
            if names:
                return zrpc.rpc_sync(names[0], relay, args=(function, names[1:]))
            zrpc.rpc_sync("worker0", function, args=(7,))
            return function

        back = zrpc.rpc_sync("worker1", relay, args=(tell, ["worker2"]))
        return found, back is tell

    assert mesh.run(0, call) == ([7], True)
