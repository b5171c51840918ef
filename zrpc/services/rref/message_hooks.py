"""What RRefs need of messages of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zrpc.calls.message_hooks import MessageHooks
from zrpc.transport.network import BULK_BYTES
from zrpc.wire.kind import UNCOUNTED, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

if TYPE_CHECKING:
    from zrpc.services.rref.service import RRefService

__all__ = ["RRefHooks"]


class RRefHooks(MessageHooks):
    """Lets a handler begin once the owners have listed the forks in its arguments.

    It also sends the end of a fork with the next message to the owner. So a program that makes a
    value, fetches it and drops the RRef, over and over, sends no messages for the last.
    """

    tag = Tag.FORKS

    def __init__(self, service: RRefService) -> None:
        self._service = service
        self.to_carry = service.dropped

    def when_ready(self, request: Message, begin: Callable[[], None]) -> None:
        """Calls ``begin()`` when the handler of a request may begin. In the I/O thread."""
        self._service.begin_when_listed(request, begin)

    def carry(self, member: MemberId, message: Message) -> None:
        """Adds what there is to tell about references, unless the message may take long."""
        if not self.to_carry or message.kind in UNCOUNTED or message.nbytes >= BULK_BYTES:
            return
        data = self._service.take_references(member)
        if data:
            message.extensions = [*message.extensions, (Tag.REFERENCES, data)]

    def undo_carry(self, member: MemberId, message: Message) -> None:
        """Takes back what `carry` has added, for another message: a repeat does no harm."""
        for tag, data in message.extensions:
            if tag == Tag.REFERENCES:
                self._service.put_back_references(member, data)
