"""Pickles functions and classes that can't be imported: by value, as cloudpickle does.

Six things differ from cloudpickle:

- What can be found in the main script by its name is pickled by that name if the receiver runs the
  same script.
- A class is made once at a receiver, and has a state of its own there from then on: see
  `ClassVersions`.
- A function that comes back to the process that has defined it is the original there, with its own
  globals: see `zrpc.function_homes`.
- A class has the slots that it was defined with. cloudpickle leaves them out, so its instances have
  another state than those of the original.
- A function with a cache (``functools.lru_cache``) is sent as other functions are, and the copy's
  cache is empty. cloudpickle sends its name, also if the receiver doesn't have it.
- The name of a function's file is kept. cloudpickle leaves it out from version 3.1.3 on, and then a
  traceback shows no lines of source.
"""

from __future__ import annotations

import enum
import functools
import io
import operator
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID

from zrpc.class_versions import ClassVersions
from zrpc.error_parts import ErrorReducers
from zrpc.function_homes import Origin, find_home, is_copy, note_copy, origin_of
from zrpc.runtime.interrupts import suppressing

# What cloudpickle puts in the place of the name.
_NO_NAME = "<dynamic-code>"
_CACHED: type = type(functools.lru_cache(len))
_CLOUDPICKLE = vars(sys.modules["cloudpickle.cloudpickle"])
# What has a name in a module that it can be found by.
_NAMED = (types.FunctionType, _CACHED, type, types.ModuleType, TypeVar)
# The length of what cloudpickle reduces a function or a class to if it goes by value.
_BY_VALUE_PARTS = 6
_reduce: Any = cloudpickle.Pickler.dispatch_table[types.CodeType]
_versions = ClassVersions(_DYNAMIC_CLASS_TRACKER_BY_ID)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce(code)
    return make, tuple(
        code.co_filename if type(each) is str and each == _NO_NAME else each for each in arguments
    )


def _reduce_cached(cached: Any) -> Any:
    """Reduces a function with a cache: to its name if it can be imported, else by value."""
    module = cached.__module__
    by_value = {*cloudpickle.list_registry_pickle_by_value(), "__main__"}
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


def _reduce_environment(environment: Any) -> Any:
    """Reduces ``os.environ`` to its name, since each process has its own."""
    return (getattr, (os, "environ")) if environment is os.environ else environment.__reduce_ex__(2)


class ByValuePickler(cloudpickle.Pickler):
    """The pickler of cloudpickle, with the names of files and of what is in the main script.

    Args:
        file: as for ``pickle.Pickler``, as the next two are.
        protocol: the protocol.
        buffer_callback: takes buffers.
        same_main: whether a name in ``__main__`` means the same at the receiver.
        copies: whether a copy is sent along with each such name, for a receiver that lacks it.
        whole: the name of what goes by value nevertheless, with all that is in it.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {
            types.CodeType: _reduce_code,
            functools.cached_property: _reduce_cached_property,
            type(os.environ): _reduce_environment,
        },
        cloudpickle.Pickler.dispatch_table,
        ErrorReducers(),
    )

    def __init__(
        self,
        file: Any,
        protocol: int | None = None,
        buffer_callback: Any = None,
        *,
        same_main: bool = False,
        copies: bool = False,
        whole: str | None = None,
    ) -> None:
        super().__init__(file, protocol, buffer_callback)
        self._same_main = same_main
        self._copies = copies
        self._whole = whole

    def reducer_override(self, obj: Any) -> Any:
        """Reduces functions and classes."""
        if type(obj) is types.FunctionType and obj.__globals__ is _CLOUDPICKLE:
            return NotImplemented  # most that come here: they make the others
        if not issubclass(type(obj), _NAMED):
            return super().reducer_override(obj)
        if (path := self.path_in_main(obj)) is not None:
            return self._reduce_to_name(obj, path)
        if type(obj) is _CACHED:
            return _reduce_cached(obj)
        reduced = super().reducer_override(obj)
        if type(reduced) is not tuple or len(reduced) != _BY_VALUE_PARTS:
            return reduced
        if type(obj) is types.FunctionType:
            make, arguments, state, *_, fill = reduced
            arguments = origin_of(obj), make, *arguments
            return _make_function, arguments, (fill, state), None, None, _fill_copy
        if isinstance(obj, type):
            number = _versions.number(obj)
            # Again, since a function may have changed before the version was read.
            make, arguments, state, *_, fill = super().reducer_override(obj)
            if vars(obj).get("__slots__") and not issubclass(obj, enum.Enum):
                arguments[3]["__slots__"] = vars(obj)["__slots__"]
            return _make_once, (make, *arguments), (number, fill, state), None, None, _fill
        return reduced

    def path_in_main(self, obj: Any) -> str | None:
        """Returns the name that the receiver finds a function or class by in its main script."""
        path = _path_in_main(obj) if self._same_main else None
        if path is None or self._whole is None or not f"{path}.".startswith(f"{self._whole}."):
            return path
        return None

    def copy(self, obj: Any) -> bytes:
        """Returns an object as a pickle, in which it goes by value.

        Raises:
            Exception: it can't be pickled.
        """
        with io.BytesIO() as file:
            type(self)(file).dump(obj)
            return file.getvalue()

    def _reduce_to_name(self, obj: Any, path: str) -> Any:
        copy = None
        if self._copies:
            with suppressing(Exception):  # it may refer to a lock, which has no copy
                copy = self.copy(obj)
        if copy is None and getattr(obj, "__module__", None) == "__main__":
            return path  # pickle's own way, which error messages and traces read
        return find_in_main, (path, copy)


def _path_in_main(obj: Any) -> str | None:
    """Returns the name that the main script has an object under; None if it has none there."""
    main = sys.modules.get("__main__")
    if obj is main:
        return ""
    if isinstance(obj, types.ModuleType):
        home, name = None, obj.__name__
        if name in sys.modules:
            return None
    else:
        home = sys.modules.get(str(obj.__module__))
        name = getattr(obj, "__qualname__", None) or obj.__name__
    if home is not main and home is not None and _attribute(home, name) is obj:
        return None
    found = _attribute(main, name)
    if found is obj:
        return name
    # A class method is found as a method of its class, and cloudpickle reduces it to its function.
    return f"{name}.__func__" if getattr(found, "__func__", None) is obj else None


def _attribute(module: Any, path: str) -> Any:
    with suppressing(Exception):  # a module or a class may run code of its own
        return _find(module, path) if "." in path else getattr(module, path, None)
    return None


def _find(module: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module) if path else module


def find_in_main(path: str, copy: bytes | None = None) -> Any:
    """Returns what the main script has under a name, or else a copy, which is a pickle."""
    try:
        return _find(sys.modules["__main__"], path)
    except AttributeError:
        if copy is None:
            raise
        return pickle.loads(copy)


def _make_once(make: Callable[..., type], *arguments: Any) -> type:
    """Returns the class that cloudpickle makes from these arguments, the last but one its id."""
    return _versions.make(arguments[-2], functools.partial(make, *arguments))


def _fill(cls: type, state: tuple[int, Callable[..., Any], tuple[dict[str, Any], Any]]) -> None:
    number, fill, (attributes, more) = state
    _versions.fill(cls, number, attributes, lambda cls, taken: fill(cls, (taken, more)))


def _make_function(
    origin: Origin, make: Callable[..., Any], code: Any, shared: Any, *more: Any
) -> Any:
    """Returns the function that comes home, or a copy; ``shared`` are the globals of the copies."""
    function, own_globals = find_home(origin)
    if function is None:
        function = make(code, shared if own_globals is None else own_globals, *more)
        note_copy(function, origin)
    return function


def _fill_copy(function: Any, state: tuple[Callable[..., Any], tuple[Any, dict[str, Any]]]) -> None:
    """Gives a copy its globals and attributes; the original keeps its own."""
    fill, (attributes, slots) = state
    if not is_copy(function):
        return
    if function.__globals__ is getattr(sys.modules.get(slots["__module__"]), "__dict__", None):
        slots = {**slots, "__globals__": {}}  # a copy at home
    fill(function, (attributes, slots))


def why_unpicklable(obj: Any, error: Exception) -> str:
    """Returns what can't be pickled, why, and what to do, for the error."""
    if isinstance(obj, types.FunctionType | type):
        return (
            f"{obj.__module__}.{obj.__qualname__}, which goes by value and can't be pickled: "
            f"{error}; move it to a module that the receiver can import, so that its name is sent, "
            "or let it create what it uses"
        )
    return (
        f"one of type {type(obj).__name__} that can't be pickled: {error}; send what it is made "
        "of, or create it on the worker that uses it"
    )
