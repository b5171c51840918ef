"""Which argument of a call has a tensor on a device that the device map doesn't name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zrpc.calls.function_names import name_of
from zrpc.wire.devices import UnmappedDevice
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder


def name_argument(error: BaseException, call: Any, encoder: Callable[[], Encoder]) -> None:
    """Raises the error of a call that can't be packed again, with the name of the argument.

    Does nothing if it has another reason, or if no argument is found.

    Args:
        error: what the packing has raised.
        call: the function or its name, args and kwargs; or anything else, which has no arguments.
        encoder: returns an encoder like the one that has failed.
    """
    if not (isinstance(error, UnmappedDevice) and isinstance(call, tuple) and len(call) == 3):
        return
    what, args, kwargs = call
    named = [*enumerate(args)] if isinstance(args, tuple) else []
    named += kwargs.items() if isinstance(kwargs, dict) else []
    for name, value in named:
        packer = encoder()
        packer.finishers = ()  # nothing is sent
        try:
            packer.pack(value, Message(0))
        except UnmappedDevice:
            raise UnmappedDevice(f"argument {name!r} of {name_of((what,))}: {error}") from None
        finally:
            packer.abort()
