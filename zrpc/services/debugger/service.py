"""Plugs the debugger into an agent: postpones deadlines while a program stands at a breakpoint.

A worker tells all others when a thread of its program begins to stand at a breakpoint, and when
none does any longer. Until then each worker gives all its outstanding calls, and all requests that
it has not answered, as much more time as passes. Heartbeats need nothing: ZeroMQ's thread answers
them whatever Python does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler, Service
from zrpc.errors import ProtocolError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# Deadlines are postponed in ticks, of a tenth of a second each. With this they never come early.
_HEADROOM_SECONDS = 0.25
_STANDS, _GOES_ON = b"\1", b"\0"
# The variable with which `zrpc launch --pdb` asks for a prompt where a handler has failed.
_POST_MORTEM = "ZRPC_PDB"


class DebuggerService(Service):
    """Knows which workers' programs stand at a breakpoint."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # Guards what follows; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        # For each thread of this worker that stands at a breakpoint: releases it.
        self._releases: list[Callable[[], None]] = []
        self._closed = False
        # Only in the I/O thread: the other workers, and when deadlines were last postponed.
        self._others: set[MemberId] = set()
        self._postponed_at: float | None = None

    @property
    def directory(self) -> Path | None:
        """This worker's private directory; None if it has none."""
        found = self.agent.membership.own_record.directory
        return Path(found) if found else None

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.BREAKPOINT: self._on_breakpoint}

    @contextlib.contextmanager
    def standing(self, release: Callable[[], None]) -> Iterator[None]:
        """Postpones all deadlines within the block, in which this thread stands at a breakpoint.

        When the agent closes, ``release`` is called by the thread that closes it.
        """
        with self._lock:
            self._releases.append(release)
            first, closed = len(self._releases) == 1, self._closed
        if closed:
            release()
        if first:
            self._announce(_STANDS)
        try:
            yield
        finally:
            with self._lock:
                self._releases.remove(release)
                last = not self._releases
            if last:
                self._announce(_GOES_ON)

    def _announce(self, body: bytes) -> None:
        membership = self.agent.membership
        for member in membership.living:
            if member != membership.own_id and not self.agent.closed:
                self.agent.outbox.post(member, Message(Kind.BREAKPOINT, body=body))

    @override
    def on_handler_failed(self, error: BaseException) -> None:
        if os.environ.get(_POST_MORTEM):
            from zrpc.services.debugger.debugger import post_mortem

            post_mortem(error)

    @override
    def stats(self) -> Mapping[str, int]:
        return {"breakpoints": len(self._releases)}

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            releases = list(self._releases)
        for release in releases:
            release()

    # -- in the I/O thread ---------------------------------------------------------------

    @override
    def tick(self) -> None:
        """Postpones all deadlines by the time since the last tick, while any program stands."""
        if not self._releases and not self._others:
            self._postponed_at = None
            return
        now = time.monotonic()
        last = self._postponed_at
        self._postponed_at = now
        seconds = _HEADROOM_SECONDS if last is None else now - last
        self.agent.caller.calls.postpone(seconds)
        self.agent.callee.requests.postpone(seconds)

    @override
    def on_member_lost(self, member: MemberId) -> None:
        """Forgets a worker that is lost."""
        self._others.discard(member)

    def _on_breakpoint(self, message: Message) -> None:
        body = bytes(message.body)
        if body == _STANDS:
            self._others.add(message.sender)
        elif body == _GOES_ON:
            self._others.discard(message.sender)
        else:
            raise ProtocolError(f"expected the state of a breakpoint, found {body[:20]!r}")
