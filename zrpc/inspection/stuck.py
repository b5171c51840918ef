"""The warning about calls that wait for long."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

from zrpc.agent import Agent
from zrpc.calls import PendingCall
from zrpc.inspection.activities import Activity, activities, users_frame
from zrpc.inspection.function_names import function_of, kind_name, readable
from zrpc.wire.kind import Kind

__all__ = ["StuckCalls"]

logger = logging.getLogger(__name__)

# A warning names calls that have waited for this part of the limit too, so that those that began
# one after the other, and wait for the same thing, are named together.
_TOGETHER = 0.5
_MOST_LINES = 10


class StuckCalls:
    """Warns of calls that wait for longer than a limit: each is named once.

    Args:
        agent: whose calls.
        limit: in seconds; 0 for never.
        explain: what is known of a peer, see `PendingCalls`.

    For one thread at a time: that which receives.
    """

    def __init__(self, agent: Agent, limit: float, explain: Callable[[int], str]) -> None:
        self._agent = agent
        self._limit = limit
        self._explain = explain
        self._named: set[int] = set()
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Warns where there is something to warn of; to be called often."""
        if not self._limit or now < self._next_look:
            return
        oldest = self._agent.caller.calls.oldest()
        if oldest is None or now - oldest.begun < self._limit:
            return
        # Those that were named already may stay the oldest for long.
        self._next_look = now + self._limit / 10
        calls = [call for call in self._agent.caller.calls.under_way() if call.kind != Kind.REMOTE]
        self._named &= {call.call_id for call in calls}
        new = [call for call in calls if call.call_id not in self._named]
        if any(now - call.begun >= self._limit for call in new):
            together = [c for c in new if now - c.begun >= self._limit * _TOGETHER]
            self._named.update(call.call_id for call in together)
            logger.warning("%s", self._warning(together, now))

    def _warning(self, calls: Sequence[PendingCall], now: float) -> str:
        waiting = {call.call_id: a for a in activities(self._agent) for call in a.calls}
        # Calls that would read alike; the first of each has waited for the longest.
        alike: dict[tuple[object, ...], list[PendingCall]] = {}
        for call in calls:
            key = (call.peer, call.what, call.kind, id(waiting.get(call.call_id)))
            alike.setdefault(key, []).append(call)
        lines = [
            self._line(same[0], waiting.get(same[0].call_id), now)
            + (f" (the longest of {len(same)} such calls)" if len(same) > 1 else "")
            for same in list(alike.values())[:_MOST_LINES]
        ]
        rest = len(alike) - len(lines)
        said = [self._explain(rank).lstrip("; ") for rank in sorted({call.peer for call in calls})]
        return "\n".join(
            [
                f"{_named(self._agent, self._agent.membership.rank)} waits for {_count(calls)}:",
                *(f"- {line}" for line in lines),
                *([f"- and others, in {rest} more places"] if rest else []),
                *(f"{text[:1].upper()}{text[1:]}." for text in said if text),
                f"`zrpc stacks {os.getpid()}` shows what each worker of the mesh does. "
                f"(warn_after is {self._limit:g} s)",
            ]
        )

    def _line(self, call: PendingCall, activity: Activity | None, now: float) -> str:
        age = now - call.begun
        return f"{self._about(call, activity)}, for {age:.1f} s, since {_clock(now - age)}"

    def _about(self, call: PendingCall, activity: Activity | None) -> str:
        what = readable(call.what) or kind_name(call.kind)
        line = f"{what} at {_named(self._agent, call.peer)}"
        if activity is None:
            return f"{line}, for which nobody waits yet that can be seen"
        where = users_frame(activity.frames)
        line += f", for which {activity.name} waits"
        if where is not None:
            line += f" at {where}"
        request = activity.request
        if request is not None:
            handler = activity.function or function_of(request) or kind_name(request.kind)
            line += f", running {handler} for {_named(self._agent, request.sender)}"
        return line


def _count(calls: Sequence[PendingCall]) -> str:
    return "a call" if len(calls) == 1 else f"{len(calls)} calls"


def _named(agent: Agent, rank: int) -> str:
    """Who that is."""
    info = agent.membership.infos[rank]
    return f"{info.name} (rank {info.id})"


def _clock(at: float) -> str:
    """A time on the clock of ``time.monotonic``, as people read it."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - at)))
