"""What a worker knows of the members that it calls, and what it tells them of its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zrpc.calls.outbox import Outbox
from zrpc.calls.pending_call import PendingCall
from zrpc.errors import WorkerDied
from zrpc.membership.view import Membership
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message


@dataclass(eq=False)
class Callees:
    """The peers of a worker's calls. Any thread may call its methods.

    Args:
        why_gone: for error messages, why a peer is gone.
        explain: for error messages, what is known about why a peer does not answer, and where a
            call to it stands, by its number. It begins with a semicolon, or is empty.

    Attributes:
        lost: the peers that are gone; a peer is first added, and then its calls fail.
        explain: the same.
    """

    _membership: Membership
    _outbox: Outbox
    _why_gone: Callable[[MemberId], str]
    explain: Callable[[MemberId, int], str]

    def __post_init__(self) -> None:
        self.lost = self._membership.lost

    def describe(self, peer: MemberId) -> str:
        """Returns a peer's name and rank, for error messages."""
        info = self._membership.infos[peer]
        return f"{info.name} (rank {info.rank})"

    def died(self, call: PendingCall) -> WorkerDied:
        """Returns the error of a call whose peer is gone."""
        return call.died(
            f"{self._why_gone(call.peer)}; calls to it fail, unless another one is started under "
            "its name and joins the mesh"
        )

    def tell_cancelled(self, call: PendingCall) -> None:
        """Tells the peer that the caller no longer waits for the answer to a call."""
        if not self._outbox.closed:
            self._outbox.post(call.peer, Message(Kind.CANCEL, call.call_id))
