"""Functions that are sent by value: what they keep, and those that come back home."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import cloudpickle
import pytest

import zrpc
from tests.support.forks import exit_code, fork
from zrpc.testing import Mesh
from zrpc.wire.pickling import dumps


def nested() -> Callable[[], Callable[[], None]]:
    def outer() -> Callable[[], None]:
        def inner() -> None:
            raise ValueError("oops")

        return inner

    return outer


def file_of(function: Any) -> str:
    name: str = function.__code__.co_filename
    return name


def copied(function: Any) -> Any:
    return pickle.loads(dumps(function))


def test_the_file_of_a_function_and_of_those_in_it_is_known() -> None:
    copy = copied(nested())
    assert copy.__code__ is not nested().__code__
    assert file_of(copy) == file_of(copy()) == __file__
    scope: dict[str, Any] = {}
    exec(compile("f = lambda: '<dynamic-code>'", "<cell 7>", "exec"), scope)
    copy = copied(scope["f"])
    assert (file_of(copy), copy()) == ("<cell 7>", "<dynamic-code>")


def test_a_remote_traceback_shows_the_lines_of_a_local_function(mesh: Mesh) -> None:
    def call() -> str:
        with pytest.raises(ValueError, match="oops") as raised:
            zrpc.rpc_sync("worker1", nested()())
        return "".join(traceback.format_exception(raised.value))

    shown = mesh.run(0, call)
    remote, _ = shown.split("The above exception was the direct cause", 1)
    assert __file__ in remote
    assert 'raise ValueError("oops")' in remote


@functools.lru_cache(maxsize=7, typed=True)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def test_a_function_with_a_cache_goes_by_value_if_its_module_does() -> None:
    assert copied(fibonacci) is fibonacci
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        copy = copied(fibonacci)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert copy is not fibonacci
    assert copy.cache_parameters() == {"maxsize": 7, "typed": True}
    assert copy(30) == 832040
    assert copy.__wrapped__.__globals__["fibonacci"] is copy


def test_a_function_with_a_cache_of_the_main_script_goes_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = types.ModuleType("__main__")
    exec("import functools\n@functools.cache\ndef five():\n    return 5", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    body = dumps(main.five, False)
    del main.five  # the receiver's main has no such name
    assert pickle.loads(body)() == 5


def test_a_local_function_with_a_cache_can_be_called(mesh: Mesh) -> None:
    def local() -> int:
        return 5

    assert mesh.run(0, zrpc.rpc_sync, "worker1", functools.cache(lambda: local() + 1)) == 6


def test_a_function_that_uses_the_environment_finds_that_of_its_process() -> None:
    environ, method = os.environ, Fraction.from_float  # a class method is the same, too
    found = pickle.loads(dumps((environ.get, lambda: environ, method), False))
    assert found[0].__self__ is environ
    assert found[1]() is environ
    assert found[2] == method


@pytest.mark.zrpc(processes=True, workers=1)
def test_a_class_keeps_its_slots(mesh: Mesh) -> None:
    class Point:
        __slots__ = ("__y", "x")

        def __init__(self) -> None:
            self.x, self.__y = 1, 2

        def content(self) -> tuple[int, int]:
            return self.x, self.__y

    there, back = mesh.run(0, lambda point: (hasattr(point, "__dict__"), point), Point())
    assert not there
    assert back.content() == (1, 2)


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
