"""Pickles functions and classes that can't be imported: by value, as cloudpickle does.

cloudpickle leaves out the name of the file with the function from version 3.1.3 on. Without it, a
traceback shows no lines of source. So it is put back here.
"""

from __future__ import annotations

import io
import types
from collections import ChainMap
from typing import Any, ClassVar

import cloudpickle

from zrpc.error_parts import ErrorReducers

__all__ = ["ByValuePickler", "dumps"]

# What cloudpickle puts in the place of the name.
_NO_NAME = "<dynamic-code>"
_reduce: Any = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _reduce(code)
    return make, tuple(
        code.co_filename if type(each) is str and each == _NO_NAME else each for each in arguments
    )


class ByValuePickler(cloudpickle.Pickler):
    """The pickler of cloudpickle, with the names of files."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table, ErrorReducers()
    )


def dumps(obj: object) -> bytes:
    """Returns an object as a pickle."""
    with io.BytesIO() as file:
        ByValuePickler(file).dump(obj)
        return file.getvalue()
