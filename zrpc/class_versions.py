"""Which classes by value a process has, and how new their code is.

A class that travels by value is made once in each process. From then on it has a state of its own
there: its data attributes, which no message sets back. Its functions and properties, and Python's
own attributes such as ``__doc__``, follow the process that has defined it. Only that process raises
the version of the class, when it finds that these functions have changed. An older version never
overwrites a newer one, and nothing that returns overwrites a class in the process that has defined
it.

This module does no I/O and does not pickle, so a test can deliver versions in any order.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zrpc.runtime.interrupts import UninterruptedLock

# cloudpickle's name for the classes that were registered with an abstract base class.
_REGISTERED = "_abc_impl"
# Attributes of classes that have functions in them, and where.
_HOLDERS = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
)
_HELD_AS = ("__func__", "fget", "fset", "fdel", "func")

Setter = Callable[[type, Any], object]


@dataclass(slots=True)
class _Version:
    """The version of a class in this process.

    Attributes:
        number: how new its code is; 0 if the class is made and not filled yet.
        code: the fingerprints of its functions by name, if the class was defined here. Otherwise
            only the names count.
        own: whether the class was defined here.
    """

    number: int
    code: Mapping[str, Any]
    own: bool


class ClassVersions:
    """The classes by value of one process. Any thread may call its methods.

    Args:
        known: finds a class by its id. Classes are added to it as they are made.
    """

    def __init__(self, known: Mapping[str, type]) -> None:
        self._known = known
        # Guards the versions. It is held while a class is made and filled, so that a thread never
        # gets half a class of another. Metaclasses may run code of the program then, which may
        # unpickle classes in the same thread; no other lock of zrpc is taken.
        self._lock = UninterruptedLock(threading.RLock())
        self._versions: weakref.WeakKeyDictionary[type, _Version] = weakref.WeakKeyDictionary()

    def number(self, cls: type) -> int:
        """Returns the version of a class that is about to be sent."""
        with self._lock:
            version = self._versions.get(cls)
            if version is None:
                version = self._versions[cls] = _Version(1, _fingerprints(cls), own=True)
            elif version.own and (code := _fingerprints(cls)) != version.code:
                version.code = code
                version.number += 1
            return version.number

    def make(self, class_id: str, make: Callable[[], type]) -> type:
        """Returns the class with an id, which ``make`` makes and adds if there is none."""
        with self._lock:
            cls = self._known.get(class_id)
            if cls is None:
                cls = make()
                self._versions[cls] = _Version(0, {}, own=False)
            return cls

    def fill(self, cls: type, number: int, attributes: Mapping[str, Any], fill: Setter) -> None:
        """Sets those attributes that a class takes over from a message.

        Args:
            cls: what `make` has returned.
            number: the version that the message has.
            attributes: all of the class in that version.
            fill: sets the attributes that it gets.
        """
        with self._lock:
            version = self._versions.get(cls)
            if version is None or version.own:
                return
            names = vars(cls)
            if not version.number:
                taken = dict(attributes)
            elif version.number < number:
                taken = {n: v for n, v in attributes.items() if n not in names or _follows(n, v)}
                for name in version.code.keys() - attributes.keys():
                    if name in names:
                        type.__delattr__(cls, name)
            else:
                taken = {}
            if _REGISTERED in attributes:  # registering a class again changes nothing
                taken[_REGISTERED] = attributes[_REGISTERED]
            fill(cls, taken)
            if version.number < number:
                version.number = number
                version.code = {n: None for n, v in attributes.items() if _is_code(v)}


def _follows(name: str, value: object) -> bool:
    """Returns whether an attribute is part of the code of a class, rather than of its state."""
    return _is_code(value) or (name.startswith("__") and name.endswith("__"))


def _is_code(value: object) -> bool:
    return hasattr(type(value), "__get__")


def _fingerprints(cls: type) -> Mapping[str, Any]:
    """Returns what shows whether a function of the class has changed, by name.

    It refers to code and not to functions, which would keep the class alive.
    """
    return {
        name: (id(value), *(_fingerprint(function) for function in _functions_in(value)))
        for name, value in list(vars(cls).items())
        if _is_code(value)
    }


def _functions_in(value: object) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, _HOLDERS):
        held = (getattr(value, name, None) for name in _HELD_AS)
        yield from (each for each in held if isinstance(each, types.FunctionType))


def _fingerprint(function: types.FunctionType) -> tuple[Any, ...]:
    """Returns what changes if a function is replaced, or gets other code or defaults in place."""
    defaults = id(function.__defaults__), id(function.__kwdefaults__)
    return (weakref.ref(function), function.__code__, *defaults)
