"""Pickles functions and classes that can't be imported: by value, as cloudpickle does.

cloudpickle leaves out the name of the file with the function from version 3.1.3 on. Without it, a
traceback shows no lines of source. So it is put back here.

cloudpickle sends a function with a cache (``functools.lru_cache``) by its name in any case, also if
the receiver doesn't have it. Here it is sent as other functions are. The copy's cache is empty.
"""

from __future__ import annotations

import functools
import io
import operator
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle

__all__ = ["CACHED", "ByValuePickler", "dumps", "reduce_cached"]

CACHED: type = type(functools.lru_cache(len))

# What cloudpickle puts in the place of the name.
_NO_NAME = "<dynamic-code>"
_reduce: Any = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce(code)
    return make, tuple(
        code.co_filename if type(each) is str and each == _NO_NAME else each for each in arguments
    )


def reduce_cached(cached: Any, same_main: bool = False) -> Any:
    """Reduces a function with a cache: to its name if the receiver has it, else by value.

    Args:
        cached: the function.
        same_main: whether the receiver has what the main script defines.
    """
    module = cached.__module__
    by_value = {*cloudpickle.list_registry_pickle_by_value(), *(() if same_main else ("__main__",))}
    if not any(module == each or module.startswith(f"{each}.") for each in by_value):
        try:
            if operator.attrgetter(cached.__qualname__)(sys.modules[module]) is cached:
                return cached.__reduce__()
        except (AttributeError, KeyError):  # it is local
            pass
    return _with_cache, (cached.__wrapped__, cached.cache_parameters())


def _with_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(cached: functools.cached_property[Any]) -> tuple[Any, ...]:
    # Up to Python 3.11 it has a lock, which can't be pickled.
    state = {name: value for name, value in vars(cached).items() if name not in ("func", "lock")}
    return functools.cached_property, (cached.func,), state


class ByValuePickler(cloudpickle.Pickler):
    """The pickler of cloudpickle, with the names of files, and what has a cache."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {
            types.CodeType: _reduce_code,
            CACHED: reduce_cached,
            functools.cached_property: _reduce_cached_property,
        },
        cloudpickle.Pickler.dispatch_table,
    )


def dumps(obj: object) -> bytes:
    """Returns an object as a pickle."""
    with io.BytesIO() as file:
        ByValuePickler(file).dump(obj)
        return file.getvalue()
