"""Which argument of a call has a tensor on a device that the device map doesn't name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zrpc.calls.function_names import name_of
from zrpc.wire.devices import UnmappedDevice
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder

__all__ = ["with_argument"]


def with_argument(error: UnmappedDevice, call: Any, encoder: Callable[[], Encoder]) -> Exception:
    """Returns the error of a call that can't be packed, with the name of the argument.

    Args:
        error: what the packing has raised.
        call: the function or its name, args and kwargs; or anything else, which has no arguments.
        encoder: returns an encoder like the one that has failed.
    """
    if isinstance(call, tuple) and len(call) == 3:
        what, args, kwargs = call
        named = [*enumerate(args)] if isinstance(args, tuple) else []
        named += kwargs.items() if isinstance(kwargs, dict) else []
        for name, value in named:
            packer = encoder()
            packer.finishers = ()  # nothing is sent
            try:
                packer.pack(value, Message(0))
            except UnmappedDevice:
                return UnmappedDevice(f"argument {name!r} of {name_of((what,))}: {error}")
            finally:
                packer.abort()
    return error
