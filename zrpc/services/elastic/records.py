"""The events of a mesh's log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord

__all__ = ["MembershipEvent", "Verb"]


class Verb(Enum):
    """What an event is about."""

    JOIN = "join"
    IN = "in"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """One event of the log."""

    verb: Verb
    token: str  # of the worker that it is about
    record: PeerRecord | None = None  # for JOIN
    # For GONE, with details for the readers of a log file.
    why: Reason | None = None
    text: str = ""

    def dump(self) -> str:
        """Returns the event as text."""
        record = None if self.record is None else self.record.dump()
        why = None if self.why is None else self.why.name
        return json.dumps([self.verb.value, self.token, record, why, self.text])

    @classmethod
    def parse(cls, text: str) -> MembershipEvent:
        """Reads an event that was written by `dump`.

        Raises:
            ValueError: it isn't an event of this version of zrpc.
        """
        try:
            verb, token, record, why, more = json.loads(text)
            event = cls(
                Verb(verb),
                str(token),
                None if record is None else PeerRecord.parse(record),
                None if why is None else Reason[why],
                str(more),
            )
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"expected an event of a mesh's log, found another: {error}") from None
        wanted = (event.verb is Verb.JOIN, event.verb is Verb.GONE)
        if wanted != (event.record is not None, event.why is not None):
            raise ValueError(f"expected an event of a mesh's log, found half of one: {text:.99}")
        if event.record is not None and event.record.token != event.token:
            raise ValueError("expected the record of the event's worker, found another worker's")
        return event
