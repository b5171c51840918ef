"""What becomes of a message that has come in: who deals with it, or who is told that it is lost."""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from zrpc.callee import UNREAD, Callee
from zrpc.caller import Caller
from zrpc.errors import ProtocolError, RpcError
from zrpc.exhaustion import advice
from zrpc.membership import Membership
from zrpc.transport.chunks import Assembler, NoMemory, is_chunk
from zrpc.transport.inbox import OutOfMemory
from zrpc.transport.network import BULK_LETTER
from zrpc.wire.header import Message, parse, parse_head
from zrpc.wire.kind import REQUESTS, Kind

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

# Messages that a shutdown does not count; they are sent with counted=False.
_UNCOUNTED = frozenset(
    (
        Kind.TERMINATION,
        Kind.SEGMENT,
        Kind.LEAVE,
        Kind.BUSY,
        Kind.INSPECT,
        Kind.SNAPSHOT,
        Kind.ROLL_CALL,
        Kind.MISSING,
    )
)
_ANSWERS = (Kind.RESULT, Kind.ERROR)

Handler = Callable[[Message], None]


class Dispatcher:
    """Gives each message that comes in to the handler of its kind, and counts it.

    In the I/O thread.

    Args:
        membership: the worker's.
        caller: the worker's; it is told of answers that are lost.
        callee: the worker's; it answers requests that are lost or that fail.
        on_outsider: takes what comes of somebody who is no member.

    Attributes:
        received: how many messages have come of each worker that is not gone, but for those that
            a shutdown does not count.
        missed: called with the worker of whom messages are lost, nobody knows which.
    """

    def __init__(
        self,
        membership: Membership,
        caller: Caller,
        callee: Callee,
        on_outsider: Callable[[bytes, bytes, Sequence[Any]], None],
    ) -> None:
        self._membership = membership
        self._caller = caller
        self._callee = callee
        self._on_outsider = on_outsider
        self.received = dict.fromkeys(membership.infos, 0)
        self._received_large: Counter[int] = Counter()  # of these, by the way for large ones
        self.missed: list[Callable[[int], None]] = []
        self._assembler = Assembler(self._on_broken_message)
        self._handlers: dict[int, Handler] = {}
        self._extension_handlers: dict[int, Callable[[Message, bytes], Any]] = {}
        self.register_extension(UNREAD, lambda answer, _: caller.undo_unread(answer.call_id))

    def register(self, kind: Kind, handler: Handler) -> None:
        """Has messages of ``kind`` given to ``handler``, in the I/O thread.

        The handler must neither wait nor unpickle. Before the agent serves only.
        """
        self._handlers[kind] = handler

    def register_extension(self, tag: int, handler: Callable[[Message, bytes], Any]) -> None:
        """Has extensions with ``tag`` read by ``handler(message, data)``, in the I/O thread.

        What it returns is ``message.attachments[tag]``. Before the agent serves only.
        """
        self._extension_handlers[tag] = handler

    def dispatch(self, identity: bytes, first: bytes, buffers: Sequence[Any]) -> None:
        """Deals with a message, as it has come from the network.

        Raises:
            OutOfMemory: there is none for it; see `lose_for_memory`.
            Exception: what its handler raises; whoever waits for an answer was told.
        """
        sender = self._membership.rank_of(identity)
        if sender is None:
            self._on_outsider(identity, first, buffers)
            return
        try:
            if is_chunk(first):
                whole = self._assembler.add(sender, first, buffers)
                if whole is None:
                    return
                first, buffers = whole
            message = parse(first, buffers, sender)
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolError(f"expected a known kind of message, found {message.kind}")
        except NoMemory as error:
            raise OutOfMemory(identity, error.head) from error
        except ProtocolError as error:
            logger.error("%s: a message from %s: %s", self._membership.info, sender, error)
            return
        if message.kind not in _UNCOUNTED:
            self.received[sender] += 1
            if identity[0] == BULK_LETTER:
                self._received_large[sender] += 1
        try:
            if message.extensions:
                message.attachments = self._read_extensions(message)
            handler(message)
        except Exception as error:
            # A segment of shared memory that isn't there any more has gone with its owner.
            gone = isinstance(error, FileNotFoundError)
            # Whatever it is, the caller must not wait for it until its deadline.
            if message.kind in REQUESTS:
                self._callee.answer_error(message, error)
            elif message.kind in _ANSWERS:
                call = self._caller.calls.pop(message.call_id)
                if call is not None:
                    hint = advice(error)
                    why = f"{error}; {hint}" if hint else error
                    unreadable = ProtocolError(f"the answer can't be read: {why}")
                    call.settle(self._caller.died(call) if gone else unreadable)
                    if gone:
                        return
            elif message.kind not in _UNCOUNTED and not gone:
                # Gradients, say: as they count as received, no roll call finds them missing.
                self._tell_missed(sender)
            raise

    def _read_extensions(self, message: Message) -> dict[int, Any]:
        handlers = self._extension_handlers
        try:
            return {
                tag: handlers[tag](message, data)
                for tag, data in message.extensions
                if tag in handlers
            }
        except struct.error as error:
            raise ProtocolError(f"an extension can't be read: {error}") from error

    @property
    def busy(self) -> bool:
        """Whether a message has come in part."""
        return self._assembler.busy

    def introduce(self, number: int) -> None:
        """A worker is about to join the mesh."""
        self.received[number] = 0

    def forget(self, rank: int) -> None:
        """A worker is gone."""
        self.received.pop(rank, None)
        self._received_large.pop(rank, None)
        self._assembler.forget(rank)

    # -- messages that are lost --------------------------------------------------------------

    def received_from(self, sender: int, way: int) -> int:
        """How many messages have come from a worker; by way 1, which is for large ones, or by 0."""
        large = self._received_large[sender]
        return large if way else self.received[sender] - large

    def miss(self, sender: int, way: int, count: int) -> None:
        """So many messages are lost, nobody knows which; they count as received from now on."""
        self._count(sender, way, count)
        self._tell_missed(sender)

    def _count(self, sender: int, way: int, count: int = 1) -> None:
        self.received[sender] += count
        if way:
            self._received_large[sender] += count

    def _tell_missed(self, sender: int) -> None:
        for tell in self.missed:
            tell(sender)

    def break_off(self, sender: int) -> None:
        """A peer has sent all of what it began to send: what has not come is lost."""
        self._assembler.break_off(sender)

    def lose_for_memory(self, error: OutOfMemory) -> None:
        """There is no memory for a message."""
        hint = advice(error)
        logger.error("%s: %s", self._membership.info, hint)
        sender = self._membership.rank_of(error.identity)
        if sender is None:
            return
        head = error.first
        if head is not None and is_chunk(head):
            head = self._assembler.lose(sender, head)
            if head is None:
                return
        of_answer = MemoryError(f"{error}, an answer of {sender}: {hint}")
        way = int(error.identity[0] == BULK_LETTER)
        self._tell_lost(sender, head, way, error, of_answer)

    def _on_broken_message(self, sender: int, head: bytes) -> None:
        """A connection broke in the midst of a message."""
        what = f"the connection from {self._membership.infos[sender]} broke in the midst of a large"
        logger.error("%s: %s message, which is lost", self._membership.info, what)
        unread = RpcError(f"{what} call: the function has not run, so that it can be called again")
        unanswered = RpcError(
            f"{what} answer, which is lost: the function has run; call it again only where it may "
            "run twice"
        )
        self._tell_lost(sender, head, 1, unread, unanswered)

    def _tell_lost(
        self,
        sender: int,
        head: bytes | memoryview | None,
        way: int,
        of_call: Exception,
        of_answer: Exception,
    ) -> None:
        """Tells whoever waits for a message that is lost, where so much of it is known."""
        # Of what nothing is known, it is taken to count: what is large does.
        message = Message(0) if head is None else parse_head(head, sender)
        if message.kind not in _UNCOUNTED:
            self._count(sender, way)
        if message.kind in REQUESTS:
            self._callee.answer_unread(message, of_call)
        elif message.kind in _ANSWERS:
            call = self._caller.calls.pop(message.call_id)
            if call is not None:
                call.settle(of_answer)
        else:
            self._tell_missed(sender)
