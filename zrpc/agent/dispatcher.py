"""What becomes of a message that has come in: its handler, or what is told that it is lost."""

from __future__ import annotations

import logging
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from zrpc.agent.service import ExtensionReader, Handler
from zrpc.calls.recorder import Recorder
from zrpc.errors import ProtocolError, of_lost_message
from zrpc.membership.view import Membership
from zrpc.transport.chunks import BEGINS_CHUNK, Assembler, head_of_remnant
from zrpc.transport.identity import BULK_LETTER
from zrpc.transport.network import size_of
from zrpc.wire.kind import ANSWERS, REQUESTS, UNCOUNTED, Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message, parse, parse_head

logger = logging.getLogger(__name__)

# Why a message is lost, and its sender.
_BROKEN = "the connection from {1} broke in the midst of a large {0}, or there was no memory for it"
_NO_MEMORY = "there was no memory for the {0} that has come from {1}"


class Undelivered(Protocol):
    """Told of messages that have come, and that no handler can take."""

    def on_unreadable(self, message: Message, error: Exception) -> None:
        """The handler of a message, or a reader of its extensions, has raised an error."""

    def on_lost(self, message: Message, error: Exception) -> None:
        """Only the header of a message has come."""


class Dispatcher:
    """Gives each message that comes in to the handler of its kind, and counts it.

    In the I/O thread.

    Args:
        requests: told of undelivered requests.
        answers: told of undelivered answers.
        on_outsider: takes the messages of senders that are no members.
        on_messages_lost: told of a member some of whose messages are lost, if it is not known
            which.
        on_unhandled: told of the same requests and answers afterwards.

    Attributes:
        received: how many counted messages have come from each member that is not lost; see
            `zrpc.wire.kind`.
        received_bytes: how many bytes have ever come from each member.
        unfinished: the messages that have come in part, by sender.
        lost: how many messages are known to be lost.
        recorder: records the messages that come while a trace is on; else None.
    """

    def __init__(
        self,
        membership: Membership,
        requests: Undelivered,
        answers: Undelivered,
        on_outsider: Callable[[bytes, bytes, Sequence[Any]], None],
        on_messages_lost: Callable[[MemberId], None],
        on_unhandled: Callable[[Message], None],
    ) -> None:
        self._membership = membership
        self._requests = requests
        self._answers = answers
        self._on_outsider = on_outsider
        self._on_messages_lost = on_messages_lost
        self._on_unhandled = on_unhandled
        self.received = dict.fromkeys(membership.infos, 0)
        self.received_bytes: Counter[MemberId] = Counter()
        self.lost = 0
        self.recorder: Recorder | None = None
        self._received_large: Counter[MemberId] = Counter()  # of these, by the way for large ones
        self._assembler = Assembler(self._on_lost)
        self.unfinished = self._assembler.unfinished
        self._handlers: dict[int, Handler] = {}
        self._readers: dict[int, ExtensionReader] = {}

    def register(self, kind: Kind, handler: Handler) -> None:
        """Gives messages of a kind to a handler, in the I/O thread.

        The handler must neither wait nor unpickle. Only before the agent serves.
        """
        self._handlers[kind] = handler

    def register_extension(self, tag: Tag, reader: ExtensionReader) -> None:
        """Reads extensions with a tag by ``reader(message, data)``, in the I/O thread.

        What it returns is ``message.attachments[tag]``. Only before the agent serves.
        """
        self._readers[tag] = reader

    def dispatch(self, at_hand: deque[tuple[bytes, bytes, Sequence[Any]]]) -> None:
        """Deals with the first of the messages that have come from the network; takes it out.

        Args:
            at_hand: of each its sender's identity, the first frame and the buffers.

        Raises:
            Exception: what its handler raises; the caller that waits for an answer was told.
        """
        sender = self._membership.member_of(at_hand[0][0])
        identity, first, buffers = at_hand.popleft()
        if sender is None:
            self._on_outsider(identity, first, buffers)
            return
        try:
            size = size_of(first, buffers) if buffers else len(first)
            self.received_bytes[sender] += size
            if first[:1] == BEGINS_CHUNK:
                head = head_of_remnant(first)
                if head is not None:
                    self._on_lost(sender, head, _NO_MEMORY, identity[0] == BULK_LETTER)
                    return
                whole = self._assembler.add(sender, first, buffers)
                if whole is None:
                    return
                first, buffers = whole
            message = parse(first, buffers, sender)
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolError(f"expected a known kind of message, found {message.kind}")
        except ProtocolError as error:
            info = self._membership.infos[sender]
            logger.error("%s: a message from %s: %s", self._membership.info, info, error)
            return
        except Exception:  # no memory; what is lost of a message in chunks, the next chunk shows
            if first[:1] != BEGINS_CHUNK:
                self._on_lost(sender, first, _NO_MEMORY, identity[0] == BULK_LETTER)
            raise
        if message.kind not in UNCOUNTED:
            self.received[sender] += 1
            if identity[0] == BULK_LETTER:
                self._received_large[sender] += 1
        try:
            if message.extensions:
                message.attachments = self._read_extensions(message)
            if self.recorder is not None:
                self.recorder.on_message(message, sender, out=False)
            handler(message)
        except Exception as error:
            self._on_unreadable(message, error)
            raise

    def _on_unreadable(self, message: Message, error: Exception) -> None:
        """Tells what waits for a message that its handler has failed: not only its deadline."""
        if message.kind in REQUESTS:
            self._requests.on_unreadable(message, error)
        elif message.kind in ANSWERS:
            self._answers.on_unreadable(message, error)
        else:
            if message.kind not in UNCOUNTED:
                # Gradients, say: as they count as received, nothing else finds them missing.
                self._on_messages_lost(message.sender)
            return
        self._on_unhandled(message)

    def _read_extensions(self, message: Message) -> dict[int, Any]:
        attachments: dict[int, Any] = {}
        try:
            for tag, data in message.extensions:
                if tag in self._readers:
                    attachments[tag] = self._readers[tag](message, data)
            return attachments
        except struct.error as error:
            raise ProtocolError(f"an extension can't be read: {error}") from error

    def introduce(self, number: MemberId) -> None:
        """A worker is about to join the mesh."""
        self.received[number] = 0

    def forget(self, member: MemberId) -> None:
        """A worker is gone."""
        self.received.pop(member, None)
        self._received_large.pop(member, None)
        self._assembler.forget(member)

    # -- messages that are lost --------------------------------------------------------------

    def received_from(self, sender: MemberId, way: int) -> int:
        """How many messages have come from a worker; by way 1, which is for large ones, or by 0."""
        large = self._received_large[sender]
        return large if way else self.received[sender] - large

    def count_missing(self, sender: MemberId, way: int, count: int) -> None:
        """Counts lost messages as received from now on, and reports that they are lost."""
        self.received[sender] += count
        self.lost += count
        if way:
            self._received_large[sender] += count
        self._on_messages_lost(sender)

    def break_off(self, sender: MemberId) -> None:
        """Gives up what has not come of a message in chunks: its sender has sent all of it."""
        self._assembler.break_off(sender)

    def _on_lost(
        self, sender: MemberId, head: bytes, why: str = _BROKEN, large: bool = True
    ) -> None:
        """Tells what waits for a message that it is lost.

        Args:
            sender: of the message.
            head: the beginning of its first frame.
            why: a format for that, with what is lost and its sender.
            large: whether it came by the way for large ones, as chunks do.
        """
        info = self._membership.infos[sender]
        logger.error(
            "%s: a message is lost: %s", self._membership.info, why.format("message", info)
        )
        message = parse_head(head, sender)
        self.lost += 1
        if message.kind not in UNCOUNTED:
            self.received[sender] += 1
            self._received_large[sender] += large
        if message.kind in REQUESTS:
            hint = "the function has not run, so that it can be called again"
            error = of_lost_message(f"{why.format('call', info)}: {hint}", executed=False)
            self._requests.on_lost(message, error)
        elif message.kind in ANSWERS:
            hint = "the function has run; call it again only if it may run twice"
            error = of_lost_message(f"{why.format('answer', info)}: {hint}", executed=True)
            self._answers.on_lost(message, error)
        else:
            self._on_messages_lost(sender)
            return
        self._on_unhandled(message)
