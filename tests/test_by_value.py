"""Functions that are sent by value keep the names of their files."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import zrpc
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
