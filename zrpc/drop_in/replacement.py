"""Puts zrpc's names into one of torch's modules.

The module stays the same object, so a program that has imported it before sees the change. Its
names are removed, and found again by a ``__getattr__`` of the module, which imports zrpc. So a
process that uses none of them doesn't load zrpc.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn

from zrpc.drop_in.names import KEPT, MODULES, OF_OLDER_TORCH, REPLACEMENTS, advice

# What was removed from each module.
_removed: dict[str, dict[str, Any]] = {}
_WAITS = ("collect_all", "wait_all")
# Modules of torch that have names of `torch.distributed.rpc` since they were imported. They get
# ours when a program first uses zrpc. DDP looks for tensors in the RRefs that a module returns.
_keepers = ["torch.nn.parallel.distributed"]


def replace_names(module: ModuleType) -> None:
    """Replaces the names of one of torch's modules. Idempotent."""
    if module.__name__ in _removed:
        return
    names = vars(module)
    offered = sorted(names)
    removed = _names_of_rpc(module)
    _removed[module.__name__] = removed
    for name in removed:
        del names[name]
    replaced = set(removed)
    if module.__name__ == "torch.distributed.rpc":  # older programs name these there
        names.setdefault("Future", sys.modules["torch.futures"].Future)
        replaced.update(OF_OLDER_TORCH)

    def find(name: str) -> Any:
        if name not in replaced:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        names[name] = value = _replacement(module.__name__, name, removed.get(name))
        return value

    names["__getattr__"] = find
    names["__dir__"] = lambda: offered


def replace_waits(futures: ModuleType) -> None:
    """Makes functions of ``torch.futures`` raise the first error of zrpc's futures, too.

    Python code can't report an error to torch's own functions, which are in C++. They still get
    calls without zrpc's futures.
    """
    if futures.__name__ not in _removed:
        _removed[futures.__name__] = {name: getattr(futures, name) for name in _WAITS}
        for name, function in _removed[futures.__name__].items():
            setattr(futures, name, _ending_early(name, function))


def _ending_early(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wait(futures: list[Any]) -> Any:
        own = getattr(sys.modules.get("zrpc.calls.future"), "Future", ())
        if any(isinstance(future, own) for future in futures):
            return getattr(importlib.import_module("zrpc.calls.future_group"), name)(futures)
        return function(futures)

    return wait


def rebind(module: ModuleType) -> None:
    """Replaces the names that a module has imported from torch's before they were replaced."""
    known = {
        id(value): (home, name)
        for home, removed in _removed.items()
        for name, value in removed.items()
    }
    for name, value in list(vars(module).items()):
        if id(value) in known:
            home, original = known[id(value)]
            setattr(module, name, getattr(sys.modules[home], original))


def derived_classes(modules: Iterable[ModuleType]) -> list[type]:
    """Returns the classes that programs have derived from those that are to be replaced."""
    derived: set[type] = set()
    for module in modules:
        for value in _names_of_rpc(module).values():
            if isinstance(value, type):
                derived.update(type.__subclasses__(value))
    return sorted((child for child in derived if child.__module__ not in MODULES), key=repr)


def _names_of_rpc(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _belongs_to_rpc(name, value)}


def is_supported(value: object) -> bool:
    """Returns whether a value found in one of torch's modules does more than raise."""
    return getattr(value, "__module__", None) != __name__


def _belongs_to_rpc(name: str, value: Any) -> bool:
    if name in REPLACEMENTS:
        return True
    is_code = isinstance(value, type) or callable(value)
    return is_code and name not in KEPT and getattr(value, "__module__", None) in MODULES


def _replacement(module: str, name: str, value: Any) -> Any:
    home = REPLACEMENTS.get(name) or OF_OLDER_TORCH.get(name)
    if home is None:
        return _unsupported(f"{module}.{name}", value)
    while _keepers:
        if (keeper := sys.modules.get(_keepers.pop())) is not None:
            rebind(keeper)
    return getattr(importlib.import_module(home), name)


def _unsupported(full_name: str, value: Any) -> Any:
    """Returns what stands for a name that zrpc doesn't support: it raises when it is called.

    A class stays a class, for annotations, ``isinstance`` and ``class Mine(Theirs)``.
    """
    text = f"expected a name that zrpc supports, but got {full_name}: {advice(full_name)}"

    def fail(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(text)

    name = full_name.rpartition(".")[2]
    if isinstance(value, type):
        return type(name, (), {"__new__": fail, "__doc__": text, "__module__": __name__})
    function: Callable[..., NoReturn] = fail
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text
    return function
