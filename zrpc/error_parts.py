"""Exceptions on their way through a pickle: taken apart, and made again without their ``__init__``.

Pickle calls an exception's class with the exception's args. That changes the text, or fails, if the
class has an ``__init__`` of its own that formats a message from other arguments. So an exception is
made by the ``__new__`` of its built-in base here, and its args and attributes are set afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

from zrpc.runtime.interrupts import suppressing

_attributes_of = BaseException.__dict__["__dict__"].__get__

# Only `__new__` sets what a group consists of. An AttributeError refers to an object of the program
# by `obj`: pickle leaves that out, too.
_NOT_SET = {*vars(BaseExceptionGroup).values(), vars(AttributeError)["obj"]}


class ErrorReducers(dict[type, Callable[[Any], Any]]):
    """A pickler's dispatch table: beside what it is given, `reduce_error` for all exceptions."""

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, BaseException) and cls not in copyreg.dispatch_table:
            return reduce_error
        return copyreg.dispatch_table[cls]


def reduce_error(error: BaseException) -> Any:
    """Reduces an exception to its class, its args and its attributes.

    If its class says how to pickle it, that is what counts, as long as it keeps the text.
    """
    if _pickles_itself(type(error)):
        reduced = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if _copy_by_pickle(error) is not None:
            return reduced
    return _make, (type(error), *_parts(error)), _state(error), None, None, _set_state


def copy_of_error(error: BaseException, exceptions: Sequence[BaseException] = ()) -> BaseException:
    """Returns a copy, without the causes and the traceback.

    Args:
        error: is copied.
        exceptions: what the copy of a group consists of.
    """
    made = _copy_by_pickle(error) if _pickles_itself(type(error)) else None
    if made is None or type(made) is not type(error):
        parts, (values, attributes) = _parts(error), _state(error)
        if parts:
            parts = parts[0], exceptions
            values["args"] = *error.args[:1], exceptions, *error.args[2:]
        made = _make(type(error), *parts)
        _set_state(made, (values, attributes))
    return made


def pickle_can_make(error: BaseException) -> bool:
    """Returns whether pickle itself makes an exception of the same class from this one."""
    with suppressing(Exception, SystemExit):
        return type(copy.copy(error)) is type(error)
    return False


def _copy_by_pickle(error: BaseException) -> Any:
    """Returns what pickle would make of an exception; None if that fails or changes the text."""
    with suppressing(Exception, SystemExit):
        made = copy.copy(error)
        if type(made) is not type(error) or str(made) == str(error):
            return made
    return None


def _pickles_itself(cls: type[BaseException]) -> bool:
    """Returns whether a class, or a base that isn't built in, says how to pickle it."""
    return any(
        name in vars(base)
        for base in cls.__mro__
        if base.__module__ != "builtins"
        for name in ("__reduce_ex__", "__reduce__", "__setstate__")
    )


def _parts(error: BaseException) -> tuple[Any, ...]:
    """Returns what ``__new__`` needs: for a group, what it consists of."""
    return (error.message, error.exceptions) if isinstance(error, BaseExceptionGroup) else ()


def _make(cls: type[BaseException], *parts: Any) -> BaseException:
    base: Any = cls
    while not isinstance(vars(base).get("__new__"), types.BuiltinFunctionType):
        base = base.__base__
    return base.__new__(cls, *parts)  # type: ignore[no-any-return]


def _fields(cls: type) -> dict[str, Any]:
    """Returns the slots of a class, and the attributes that its built-in bases keep in C."""
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return {
        name: field
        for base in reversed(cls.__mro__)
        for name, field in vars(base).items()
        if isinstance(field, kinds) and not name.endswith("__") and field not in _NOT_SET
    }


def _state(error: BaseException) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of an exception's fields, args among them, and its attributes."""
    values = {}
    for name, field in _fields(type(error)).items():
        with contextlib.suppress(AttributeError):  # it has no value
            value = field.__get__(error)
            # In C, None may mean that it has none. To set it would change the text of an OSError.
            if value is not None or field.__objclass__.__module__ != "builtins":
                values[name] = value
    return values, _attributes_of(error)


def _set_state(error: BaseException, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    # Not by setattr, which a class may refuse, as frozen dataclasses do.
    values, attributes = state
    fields = _fields(type(error))
    for name, value in values.items():
        fields[name].__set__(error, value)
    _attributes_of(error).update(attributes)
