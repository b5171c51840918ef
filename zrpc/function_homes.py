"""In which process a function by value was defined: there, a copy that comes back is the original.

A function that travels by value is copied, and its globals are copied with it. A copy keeps the
number that the function has in the process that has defined it. If a message brings a copy back
there, it is the function itself that arrives, with its own globals. If nothing refers to that
function any more, a copy is made that has its module's globals.

Several workers may live in one process, as threads. What goes from one to another is a copy, too:
only the copy of a copy can be at home.
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import weakref
from types import FunctionType
from typing import Any

# Stands for the process that has defined a function, the function's number there, the module whose
# globals it has (empty if it has others), and whether what is sent is a copy.
Origin = tuple[str, int, str, bool]
# Each operation on one of these is atomic, and a function is in one of the first two only. So two
# threads that send a function for the first time at worst give it two numbers.
_origins: weakref.WeakKeyDictionary[FunctionType, Origin] = weakref.WeakKeyDictionary()
_own: weakref.WeakValueDictionary[int, FunctionType] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_process = secrets.token_hex(8)


def origin_of(function: FunctionType) -> Origin:
    """Returns where a function comes from that is about to be sent by value."""
    origin = _origins.get(function)
    if origin is None:
        module = sys.modules.get(function.__module__)
        own_globals = getattr(module, "__dict__", None) is function.__globals__
        home = function.__module__ if own_globals else ""
        origin = _origins[function] = (_process, next(_numbers), home, False)
        _own[origin[1]] = function
    return origin


def find_home(origin: Origin) -> tuple[FunctionType | None, dict[str, Any] | None]:
    """Returns the function that a message brings home, if it exists, and else its globals if known.

    Both are None if it is not at home here.
    """
    process, number, home, is_copy = origin
    if not is_copy or process != _process:
        return None, None
    module = sys.modules.get(home)
    return _own.get(number), None if module is None else vars(module)


def is_copy(function: FunctionType) -> bool:
    """Returns whether a message has brought a function that was defined elsewhere."""
    return _origins[function][3]


def note_copy(function: FunctionType, origin: Origin) -> None:
    """Notes where a function comes from that a message has brought."""
    process, number, home, _ = origin
    _origins[function] = process, number, home, True


def _begin_in_child() -> None:
    # What the parent has defined has its number there.
    global _process
    _process = secrets.token_hex(8)
    for function in _own.values():
        _origins.pop(function, None)
    _own.clear()


os.register_at_fork(after_in_child=_begin_in_child)
