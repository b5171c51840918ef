"""The warning about slow calls."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

from zrpc.agent.agent import Agent
from zrpc.calls.function_names import asked_for
from zrpc.calls.pending_call import PendingCall
from zrpc.services.inspection.snapshot import Activity
from zrpc.services.inspection.stacks import activities
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

logger = logging.getLogger("zrpc.inspection.stuck")

# A warning also names calls that have waited for this part of the limit, so that calls which began
# one after the other, and wait for the same thing, are named together.
_TOGETHER_FRACTION = 0.5
_MAX_LINES = 10


class StuckCalls:
    """Warns of calls that wait for longer than a limit, in seconds. Each is named once.

    With a limit of 0 there is no warning. For one thread at a time: the one that receives.

    Args:
        explain: what is known of a callee.
        standing: where a call to it stands, as it said last.
    """

    def __init__(
        self,
        agent: Agent,
        limit: float,
        explain: Callable[[MemberId], str],
        standing: Callable[[MemberId, int], str],
    ) -> None:
        self._agent = agent
        self._name = agent.callees.describe
        self._limit = limit
        self._explain = explain
        self._standing = standing
        self._named: set[int] = set()
        self._next_check = 0.0

    def check_calls(self, now: float) -> None:
        """Warns if a call has waited for too long; to be called often."""
        if not self._limit or now < self._next_check:
            return
        oldest = self._agent.caller.calls.oldest()
        if oldest is None or now - oldest.begun < self._limit:
            return
        # Calls that were named already may stay the oldest.
        self._next_check = now + self._limit / 10
        in_flight = self._agent.caller.calls.in_flight()
        calls = [call for call in in_flight if call.kind not in (Kind.REMOTE, Kind.STREAM)]
        self._named &= {call.call_id for call in calls}
        new = [call for call in calls if call.call_id not in self._named]
        if any(now - call.begun >= self._limit for call in new):
            least = self._limit * _TOGETHER_FRACTION
            together = [call for call in new if now - call.begun >= least]
            self._named.update(call.call_id for call in together)
            logger.warning("%s", self._warning(together, now))

    def _warning(self, calls: Sequence[PendingCall], now: float) -> str:
        waiting = {call_id: each for each in activities(self._agent) for call_id in each.calls}
        # Calls that would read the same; the first of each has waited for the longest.
        alike: dict[tuple[object, ...], list[PendingCall]] = {}
        for call in calls:
            key = (call.peer, call.what, call.kind, id(waiting.get(call.call_id)))
            alike.setdefault(key, []).append(call)
        lines = [
            self._describe(same[0], waiting.get(same[0].call_id), now)
            + (f" (the longest of {len(same)} such calls)" if len(same) > 1 else "")
            for same in list(alike.values())[:_MAX_LINES]
        ]
        rest = len(alike) - len(lines)
        peers = sorted({call.peer for call in calls})
        notes = [self._explain(member).lstrip("; ") for member in peers]
        count = "a call" if len(calls) == 1 else f"{len(calls)} calls"
        return "\n".join(
            [
                f"{self._name(self._agent.membership.own_id)} waits for {count}:",
                *(f"- {line}" for line in lines),
                *([f"- and others, in {rest} more places"] if rest else []),
                *(f"{note[:1].upper()}{note[1:]}." for note in notes if note),
                f"`zrpc stacks {os.getpid()}` shows what each worker of the mesh does. "
                f"(warn_after is {self._limit:g} s)",
            ]
        )

    def _describe(self, call: PendingCall, activity: Activity | None, now: float) -> str:
        what = asked_for(call.what, call.kind)
        line = f"{what} at {self._name(call.peer)}, for which "
        if activity is None:
            line += "nobody waits yet that can be seen"
        else:
            line += f"{activity.name} waits"
            if activity.where is not None:
                line += f" at {activity.where}"
            if activity.request is not None:
                line += f", running {activity.what} for {self._name(activity.request[0])}"
        standing = self._standing(call.peer, call.call_id)
        there = f"; there it is {standing}" if standing else ""
        return f"{line}, for {now - call.begun:.1f} s, since {_clock(call.begun)}{there}"


def _clock(at: float) -> str:
    """Returns a time on the clock of ``time.monotonic`` as the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - at)))
