"""The message that the current thread packs or unpacks, as reducers and rebuilt values see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from zrpc.errors import SerializationError
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.tensors import TensorWriter

__all__ = ["PackedMessage", "current_encoder", "decoder", "encoder", "thread"]

# .encoder and .decoder belong to the message that this thread packs or unpacks, if any.
thread = threading.local()


class PackedMessage(Protocol):
    """A message that is being packed; see `zrpc.wire.pickling.Encoder`."""

    owner: object
    destination: MemberId
    same_main: bool
    in_graph: bool
    _tensors: TensorWriter | None

    @property
    def tensors(self) -> TensorWriter:
        """The tensors that have been added to the message."""

    def extension(self, tag: int, /) -> bytearray:
        """Returns the bytes of the extension with this tag, for a service to append to."""

    def undo(self, action: Callable[[], None], /) -> None:
        """Has ``action`` called if the message is not sent after all."""

    def sendable(self, attributes: dict[str, Any], /) -> dict[str, Any]:
        """Returns those attributes of a tensor that can be pickled; warns of the others."""


class UnpackedMessage(Protocol):
    """A message that is being unpacked; see `zrpc.wire.unpickling.Decoder`."""

    message: Message
    tensors: list[torch.Tensor]


def encoder() -> PackedMessage | None:
    """Returns the message that this thread packs, if any; for reducers."""
    return getattr(thread, "encoder", None)


def current_encoder() -> PackedMessage:
    """Returns the message that this thread packs.

    Raises:
        SerializationError: this thread packs no message.
    """
    current = encoder()
    if current is None:
        raise SerializationError("tensors are reduced this way only inside of a message")
    return current


def decoder() -> UnpackedMessage:
    """Returns the message that this thread unpacks; for rebuilding values.

    Raises:
        SerializationError: this thread unpacks no message.
    """
    current: UnpackedMessage | None = getattr(thread, "decoder", None)
    if current is None:
        raise SerializationError("this pickle is part of a message and can only be read there")
    return current
