"""The message that the current thread packs or unpacks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from zrpc.errors import SerializationError

if TYPE_CHECKING:
    from zrpc.wire.pickling import Encoder
    from zrpc.wire.unpickling import Decoder

__all__ = ["current_encoder", "decoder", "encoder", "thread"]

# .encoder and .decoder belong to the message that this thread packs or unpacks, if any.
thread = threading.local()


def encoder() -> Encoder | None:
    """Returns the encoder of the message that this thread packs, if any; for reducers."""
    return getattr(thread, "encoder", None)


def current_encoder() -> Encoder:
    """Returns the encoder of the message that this thread packs.

    Raises:
        SerializationError: this thread packs no message.
    """
    current = encoder()
    if current is None:
        raise SerializationError("tensors are reduced this way only inside of a message")
    return current


def decoder() -> Decoder:
    """Returns the decoder of the message that this thread unpacks; for rebuilding values.

    Raises:
        SerializationError: this thread unpacks no message.
    """
    current: Decoder | None = getattr(thread, "decoder", None)
    if current is None:
        raise SerializationError("this pickle is part of a message and can only be read there")
    return current
