"""Functions that are sent by value: the names of their files, and caches."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import cloudpickle
import pytest

import zrpc
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh
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


def test_the_file_of_a_function_and_of_those_in_it_is_known() -> None:
    copied = pickle.loads(dumps(nested()))
    assert copied.__code__ is not nested().__code__
    assert file_of(copied) == file_of(copied()) == __file__


def test_functions_of_a_cell_or_a_string_keep_its_name() -> None:
    scope: dict[str, Any] = {}
    exec(compile("f = lambda: '<dynamic-code>'", "<cell 7>", "exec"), scope)
    copied = pickle.loads(dumps(scope["f"]))
    assert file_of(copied) == "<cell 7>"
    assert copied() == "<dynamic-code>"


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


def test_a_function_with_a_cache_that_can_be_imported_goes_by_its_name() -> None:
    assert pickle.loads(dumps(fibonacci)) is fibonacci


def test_a_function_with_a_cache_goes_by_value_if_its_module_does() -> None:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        copied = pickle.loads(dumps(fibonacci))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert copied is not fibonacci
    assert copied.cache_parameters() == {"maxsize": 7, "typed": True}
    assert copied(30) == 832040
    assert copied.__wrapped__.__globals__["fibonacci"] is copied


def test_a_local_function_with_a_cache_can_be_called(mesh: Mesh) -> None:
    def local() -> int:
        return 5

    call = functools.partial(zrpc.rpc_sync, "worker1", functools.cache(local))
    assert mesh.run(0, call) == 5
    assert mesh.run(0, zrpc.rpc_sync, "worker1", functools.cache(lambda: local() + 1)) == 6


def test_a_class_with_a_cached_property_goes_by_value() -> None:
    class Local:
        @functools.cached_property
        def value(self) -> list[int]:
            return []

    copied = pickle.loads(dumps(Local))()
    assert copied.value is copied.value


def test_a_function_that_uses_the_environment_finds_that_of_its_process() -> None:
    environ = os.environ
    found = pickle.loads(dumps((environ.get, lambda: environ), False))
    assert found[0].__self__ is environ
    assert found[1]() is environ


@pytest.mark.system
def test_a_function_with_a_cache_of_the_main_script_runs_in_processes(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fibonacci, "__module__", "__main__")
    mesh = make_mesh(workers=2, processes=True)
    assert mesh.run(0, fibonacci, 20) == 6765
    assert mesh.run(0, zrpc.rpc_sync, "worker1", fibonacci, (20,)) == 6765


@pytest.mark.system
def test_a_class_keeps_its_slots(make_mesh: MakeMesh) -> None:
    class Point:
        __slots__ = ("__y", "x")

        def __init__(self) -> None:
            self.x, self.__y = 1, 2

        def content(self) -> tuple[int, int]:
            return self.x, self.__y

    class Failed(Exception):
        __slots__ = ("code",)

        def __init__(self, code: int) -> None:
            self.code = code

    def fail() -> None:
        raise Failed(3)

    mesh = make_mesh(workers=1, processes=True)
    there, back = mesh.run(0, lambda point: (hasattr(point, "__dict__"), point), Point())
    assert not there
    assert back.content() == (1, 2)
    with pytest.raises(Failed) as caught:
        mesh.run(0, fail)
    assert caught.value.code == 3


def test_a_class_method_of_a_module_is_the_same_in_a_message_by_value() -> None:
    method = Fraction.from_float
    assert pickle.loads(dumps([method, lambda: 0]))[0] == method
