"""How what several members on another host get is sent there once.

Their requests do not have the *part*, but name a *relay*, which is one of them. A member asks the
relay for the part before it unpacks its request. At the first such question the relay asks the
caller; it puts the part into shared memory, and answers all. If the relay is lost, or does not
answer in time, the member asks the caller itself.

So requests, results, errors, deadlines and cancellation take the same way as in any other call, and
each request is sent once, whatever becomes of the relay. The questions are ordinary calls, of the
functions at the end of this module. When no member waits any longer, the caller tells the relays by
a message of the kind UNNEEDED.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.cancel_scope import activate, current_scope
from zrpc.calls.future import Future
from zrpc.calls.future_error import without_frames
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import RpcCancelledError
from zrpc.functions import async_execution
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.groups.part import Part
from zrpc.services.groups.service import GroupService
from zrpc.services.groups.ticket import NUMBER, TICKET
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.unpickling import Decoder

# How long a member waits for the relay, which may stand still: a time, at most half of what is left
# for the call, and one for each byte.
_PATIENCE_SECONDS = 5.0
_PATIENCE_PER_BYTE = 1e-7


class RelayService(Service, MessageHooks):
    """Hands on parts of calls from other hosts, and asks for those of this worker's requests."""

    tag = Tag.RELAYED

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # Guards what follows; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        # What this worker hands on, by the caller and its number there.
        self._copies: dict[tuple[MemberId, int], Future[Part | None]] = {}
        self._closed = False

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.UNNEEDED: self._on_unneeded}

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.RELAYED: lambda _, data: list(TICKET.iter_unpack(data))}

    @override
    def message_hooks(self) -> MessageHooks:
        return self

    # -- a member ----------------------------------------------------------------------------

    @override
    def open(self, decoder: Decoder) -> None:
        """Gets the parts of a request, in the thread that unpacks it."""
        message = decoder.message
        assert message.attachments is not None
        tickets = message.attachments[Tag.RELAYED]
        message.attachments[Tag.RELAYED] = [self._get(message.sender, *each) for each in tickets]

    def _get(self, caller: MemberId, relay: MemberId, number: int, nbytes: int) -> Sequence[Any]:
        # In the scope of the handler, but in none of its contexts: this is no part of a graph.
        scope, context = current_scope(), contextvars.Context()
        context.run(activate, scope)
        left = None if scope is None else scope.remaining()
        patience = _PATIENCE_SECONDS if left is None else min(_PATIENCE_SECONDS, left / 2)
        patience += nbytes * _PATIENCE_PER_BYTE
        blocks = None
        with contextlib.suppress(Exception):
            blocks = context.run(self._ask, relay, _handed_on, caller, number, timeout=patience)
        if blocks is None:
            blocks = context.run(self._ask, caller, _part, number, None)
        if blocks is None:
            raise RpcCancelledError(
                "expected a caller that waits for the answer, found that it no longer has the "
                "arguments: it has cancelled the call, or it has timed out"
            )
        return blocks

    def _ask(
        self, member: MemberId, function: Callable[..., Any], *args: Any, timeout: float = 0
    ) -> Sequence[Any] | None:
        """Asks for a part, by one of the functions below; returns its blocks."""
        info = self.agent.membership.infos[member]
        blocks: Sequence[Any] | None
        blocks = self.agent.caller.call(info, Kind.CALL, (function, args, {}), timeout)
        return blocks

    # -- a relay -----------------------------------------------------------------------------

    def copy(self, caller: MemberId, number: int) -> Future[Part | None]:
        """Returns a future of a part, which is sent here once; of None if it is not needed."""
        key = caller, number
        with self._lock:
            copy = self._copies.get(key)
            begins = copy is None
            if copy is None:
                copy = Future()
                # Under the lock: a peer is marked as lost before `on_member_lost`.
                if not self._closed and caller not in self.agent.membership.lost:
                    self._copies[key] = copy
        if begins:
            self.agent.pool.submit(partial(self._fetch, key, copy))
        return copy

    def _fetch(self, key: tuple[MemberId, int], copy: Future[Part | None]) -> None:
        """Gets a part from its caller; that ends when it comes, or the caller is lost."""
        caller, number = key
        part = None
        try:
            blocks = self._ask(caller, _part, number, self.agent.membership.own_id)
            if blocks is not None:
                part = Part(self.agent.service(GroupService), blocks)
                part.lay()
        except Exception as error:
            self._drop(key)
            copy.set_exception(without_frames(error))
            return
        if part is None:
            self._drop(key)
        copy.set_result(part)

    def _drop(self, *keys: tuple[MemberId, int]) -> None:
        with self._lock:
            dropped = [self._copies.pop(key, None) for key in keys]
        dropped.clear()  # without the lock: memory is freed

    def _on_unneeded(self, message: Message) -> None:
        self._drop(*[(message.sender, number) for (number,) in NUMBER.iter_unpack(message.body)])

    @override
    def on_member_lost(self, member: MemberId) -> None:
        with self._lock:
            of_it = [key for key in self._copies if key[0] == member]
        self._drop(*of_it)

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            left = list(self._copies)
        self._drop(*left)


# The functions that workers call on each other.


def _part(number: int, relay: MemberId | None) -> Part | None:
    part: Part | None = current_agent().service(GroupService).lent(number, relay)
    return part


@async_execution
def _handed_on(caller: MemberId, number: int) -> Future[Part | None]:
    return current_agent().service(RelayService).copy(caller, number)
