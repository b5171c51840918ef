"""What a user knows of one of its forks. No I/O in here."""

from __future__ import annotations

from dataclasses import dataclass, field

from zrpc.services.rref.messages import ForkId, RRefId
from zrpc.wire.member_id import MemberId


@dataclass(slots=True)
class Held:
    """One fork of a user's, and the children that it has handed on."""

    rref_id: RRefId
    owner: MemberId
    handles: int = 1  # more if the message with the fork came twice
    listed: bool = False  # the owner has confirmed it
    children: dict[ForkId, MemberId] = field(default_factory=dict)  # unlisted, by receiver
