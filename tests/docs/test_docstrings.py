"""The examples in the docstrings of the package really run.

Each runs on worker0 of a mesh of three, with what the module has, torch, and zrpc's names at hand.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zrpc

# Importing it runs the command line.
_NOT_IMPORTED = {"zrpc.cli.__main__"}
if importlib.util.find_spec("ray") is None:
    _NOT_IMPORTED.add("zrpc.integrations.ray")  # it needs the extra `ray`


def _modules() -> Iterator[str]:
    yield "zrpc"
    for module in pkgutil.walk_packages(zrpc.__path__, "zrpc."):
        if module.name not in _NOT_IMPORTED:
            yield module.name


def _examples() -> list[Any]:
    names = {name: getattr(zrpc, name) for name in zrpc.__all__}
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for name in _modules():
        module = importlib.import_module(name)
        globs = {**names, "torch": torch, **vars(module)}
        found += [test for test in finder.find(module, name, globs=globs) if test.examples]
    return [pytest.param(test, id=test.name) for test in found]


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
@pytest.mark.parametrize("example", _examples())
def test_example(mesh: Any, example: doctest.DocTest) -> None:
    told: list[str] = []

    def run() -> doctest.TestResults:
        return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)

    assert mesh.run("worker0", run).failed == 0, "".join(told)


@pytest.mark.system
def test_the_functions_that_programs_call_have_examples() -> None:
    have = {param.id.rpartition(".")[2] for param in _examples()}
    functions = {name for name in zrpc.__all__ if inspect.isfunction(getattr(zrpc, name))}
    assert have >= functions | {"RRef", "Future", "WorkerInfo", "RpcError"}
