"""The base class of hooks that see each message that is sent or received."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder
from zrpc.wire.unpickling import Decoder


class MessageHooks:
    """Sees a worker's messages. Override what is needed: here each method does nothing.

    Several threads may call these methods at once. Only methods that a subclass overrides are
    called, so the others cost a call no time.

    Attributes:
        tag: `open`, `request_scope` and `when_ready` are called for messages with this extension
            only.
        context: if this is set, or in a request that has the tag, `finish` must see the messages
            that are packed: those that the thread sends, or those that answer the request.
        to_carry: not empty if `carry` has something to add to the next message to any peer.
    """

    tag: ClassVar[Tag | None] = None
    context: ClassVar[ContextVar[Any] | None] = None
    to_carry: Collection[object] = ()

    def finish(self, encoder: Encoder) -> None:
        """Adds to an outgoing message, once all its values are packed."""

    def open(self, decoder: Decoder) -> None:
        """Changes the tensors of an incoming message, before its body is unpickled."""

    def request_scope(self, request: Message) -> AbstractContextManager[Any]:
        """Returns a context manager that the handler of a request runs in."""
        return contextlib.nullcontext()

    def when_ready(self, request: Message, begin: Callable[[], None]) -> None:
        """Calls ``begin()`` when the handler of a request may begin. In the I/O thread."""
        begin()

    def carry(self, member: MemberId, message: Message) -> None:
        """Takes large buffers out of a message to a peer, to send them another way."""

    def memory(self, member: MemberId, size: int) -> Any:
        """Returns memory from which large buffers are carried to a peer without another copy.

        It is a writable buffer; None if there is none.
        """
        return None

    def undo_carry(self, member: MemberId, message: Message) -> None:
        """Undoes what `carry` did for a message that can't be sent."""


T = TypeVar("T")


def overriding(base: type[T], method: str, objects: Iterable[T]) -> tuple[T, ...]:
    """Returns the objects whose class overrides the method of ``base`` with this name."""
    default = getattr(base, method)
    return tuple(each for each in objects if getattr(type(each), method) is not default)
