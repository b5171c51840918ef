"""What workers send each other about names, as JSON: it is read in the I/O thread."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from zrpc.errors import expecting
from zrpc.wire.member_id import NOBODY, MemberId


class Ballot(NamedTuple):
    """A term of an arbiter. Of two terms, the greater one began later."""

    epoch: int
    arbiter: MemberId


# Before the first term: no member is the arbiter.
NO_BALLOT = Ballot(0, NOBODY)


class Holder(NamedTuple):
    """A claim or a question of a member, by the member's own count; a claim may become a holder."""

    member: MemberId
    number: int


class Grant(NamedTuple):
    """Where a name was granted: in which term, and as the how-manieth of it."""

    ballot: Ballot
    serial: int


class Ask(NamedTuple):
    """To the arbiter: who holds this name?

    Attributes:
        name: the name.
        asker: who wants to know.
        claims: if nobody holds it, the asker wants it. Else it is told when somebody does.
        past: a holder that the asker knows already; it is told of the next one.
        unreachable: the asker's arbiter is lost, as far as it knows, and had this term.
    """

    name: str
    asker: Holder
    claims: bool
    past: Holder | None
    unreachable: Ballot


class Held(NamedTuple):
    """Answers `Ask`: this one holds the name; maybe the asker itself, from now on."""

    name: str
    number: int
    holder: Holder
    grant: Grant


class Free(NamedTuple):
    """To the arbiter: the sender no longer holds this name, or no longer asks."""

    name: str
    number: int


class Collect(NamedTuple):
    """A new term has begun. From its arbiter, to all: which names do you hold?"""

    ballot: Ballot


class Report(NamedTuple):
    """Answers `Collect`: these names, each with its number and its grant."""

    ballot: Ballot
    names: list[tuple[str, int, Grant]]


class Lose(NamedTuple):
    """To a holder: another worker holds the name by a later grant."""

    name: str
    number: int


class Naming(NamedTuple):
    """In the message that makes an actor, as an extension.

    Attributes:
        name: the actor's name.
        what: what is made, for messages to people.
        actor: whether it is an actor, whose callers number their calls.
        past: see `Ask`.
        restarts: whether its maker makes it again.
    """

    name: str
    what: str
    actor: bool = False
    past: Holder | None = None
    restarts: bool = False

    def pack(self) -> bytes:
        """Returns it as bytes."""
        return json.dumps(self).encode()

    @classmethod
    @expecting("the name of an actor")
    def parse(cls, data: bytes) -> Naming:
        """Reads what `pack` has written.

        Raises:
            ProtocolError: it is something else.
        """
        name, what, actor, past, restarts = json.loads(data)
        holder = _holder_or_none(past)
        return cls(str(name), str(what), bool(actor), holder, bool(restarts))


NameMessage = Ask | Held | Free | Collect | Report | Lose
_KINDS: tuple[type[NameMessage], ...] = (Ask, Held, Free, Collect, Report, Lose)


def dump(message: NameMessage) -> bytes:
    """Returns a message as bytes."""
    return json.dumps([_KINDS.index(type(message)), *message]).encode()


@expecting("a message about names")
def parse(data: bytes | bytearray | memoryview) -> NameMessage:
    """Reads a message that `dump` has written.

    Raises:
        ProtocolError: it is something else.
    """
    kind, *fields = json.loads(bytes(data))
    return _read(_KINDS[kind], fields)


def _read(kind: type[NameMessage], fields: list[Any]) -> NameMessage:
    if kind is Ask:
        name, asker, claims, past, unreachable = fields
        asked = str(name), _holder(asker), bool(claims), _holder_or_none(past)
        return Ask(*asked, _ballot(unreachable))
    if kind is Held:
        name, number, holder, grant = fields
        return Held(str(name), int(number), _holder(holder), _grant(grant))
    if kind is Report:
        ballot, names = fields
        return Report(_ballot(ballot), [(str(n), int(i), _grant(grant)) for n, i, grant in names])
    if kind is Free or kind is Lose:
        name, number = fields
        return kind(str(name), int(number))
    [ballot] = fields
    return Collect(_ballot(ballot))


def _holder(fields: Any) -> Holder:
    member, number = fields
    return Holder(MemberId(int(member)), int(number))


def _holder_or_none(fields: Any) -> Holder | None:
    return None if fields is None else _holder(fields)


def _ballot(fields: Any) -> Ballot:
    epoch, arbiter = fields
    return Ballot(int(epoch), MemberId(int(arbiter)))


def _grant(fields: Any) -> Grant:
    ballot, serial = fields
    return Grant(_ballot(ballot), int(serial))
