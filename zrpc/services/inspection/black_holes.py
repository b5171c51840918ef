"""Finds paths on which large packets get lost and small ones don't.

The heartbeats of such a peer are answered, so it is never declared dead. But calls to it wait for
their whole time-out. So large packets are sent to a peer that lives and has not answered a question
for some seconds; see `zrpc.transport.probes`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection

from zrpc.agent.agent import Agent
from zrpc.transport.probes import PathProbe
from zrpc.wire.member_id import MemberId

logger = logging.getLogger(__name__)

# When a path is looked at again.
_AGAIN_SECONDS = 30.0
# How many are looked at once.
_MAX_PROBES = 8
_TEXT = (
    "large packets do not reach {name} at {endpoint}, and small ones do: the network in between "
    "drops what is larger than it can carry (its MTU), without a word. Set a smaller MTU on this "
    "host, or net.ipv4.tcp_mtu_probing=1, or let ICMP pass the firewalls"
)


class BlackHoles:
    """The paths from one worker on which large packets get lost. For the thread that receives.

    Any thread may call `explain`.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._probes: dict[MemberId, PathProbe] = {}
        self._next: dict[MemberId, float] = {}  # when a path is looked at again
        self._found: set[MemberId] = set()

    def look(self, silent: Collection[MemberId], now: float) -> None:
        """Looks for black holes; must be called often.

        Args:
            silent: the peers that have not answered a question for some seconds.
            now: the time in seconds, on a clock that does not go back.
        """
        for member in [m for m in (*self._probes, *self._next) if m not in silent]:
            self.forget(member)  # it has answered
        for member in silent:
            self._begin(member, now)
        for member, probe in list(self._probes.items()):
            arrive = probe.large_packets_arrive()
            if arrive is None and probe.pending and now < self._next[member]:
                continue
            self._probes.pop(member).close()
            if arrive is False and self._agent.liveness.silence(member) == 0:
                if member not in self._found:
                    logger.warning("%s: %s", self._agent.worker_info, self._describe(member))
                self._found.add(member)
            else:
                self._found.discard(member)

    def _begin(self, member: MemberId, now: float) -> None:
        endpoint = self._agent.network.endpoint(member)
        if (
            endpoint.startswith("tcp://")
            and now >= self._next.get(member, now)
            and len(self._probes) < _MAX_PROBES
        ):
            self._next[member] = now + _AGAIN_SECONDS
            with contextlib.suppress(OSError):  # out of descriptors
                self._probes[member] = PathProbe(endpoint)

    def _describe(self, member: MemberId) -> str:
        name = self._agent.callees.describe(member)
        return _TEXT.format(name=name, endpoint=self._agent.network.endpoint(member))

    def explain(self, member: MemberId) -> str:
        """Returns what is wrong with the path to a member, as a sentence; empty if nothing is."""
        return self._describe(member) if member in self._found else ""

    def forget(self, member: MemberId) -> None:
        """Drops what is known of the path to a member."""
        self._next.pop(member, None)
        self._found.discard(member)
        if member in self._probes:
            self._probes.pop(member).close()

    def close(self) -> None:
        """Abandons the probes."""
        for member in list(self._probes):
            self.forget(member)
