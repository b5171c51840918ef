"""How a worker monitors its peers: the I/O around `zrpc.membership.failure_detector`."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from zrpc.membership.failure_detector import FailureDetector, Loss, Reason
from zrpc.membership.view import Membership
from zrpc.transport.address import is_alive
from zrpc.transport.network import Network
from zrpc.transport.probes import ListenerProbe
from zrpc.wire.member_id import MemberId

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
# When to try again what the system did not allow.
_RETRY_SECONDS = 1.0
# Why a worker is lost whose process may still run; and reasons that are also learned later.
_MAY_LIVE = (
    Reason.SILENT,
    Reason.DECLARED_DEAD,
    Reason.NO_WAY_BACK,
    Reason.PUT_OUT,
    Reason.OUT,
)
_FINAL = (Reason.ENDED, Reason.LEFT, Reason.REPLACED)
_NO_WAY_THERE = (
    "no connection to it at {endpoint} could be made: a firewall or the network is in the way, or "
    "its process is stopped"
)
_LET_IT_CONNECT = (
    ": it has tried {tried}, where this worker listens. Let its host connect to the ports of this "
    "one, for example through a firewall, or set ZRPC_IFACE here to an interface that it reaches"
)


@dataclass(eq=False)
class LivenessMonitor:
    """Finds out which peers of one worker are gone.

    Args:
        network: the worker's.
        membership: the worker's; members that are gone are marked there.
        limit: how long a peer may be silent, in seconds; 0 for no limit.
        received: how many messages came from each worker that is not gone, kept by the agent.

    Attributes:
        suspected: workers to monitor before any message was exchanged with them: their messages
            are late, or others no longer reach them. From any thread.
        missed: how often the heartbeats of a peer have stopped: it did not answer in time, or the
            connection broke.
        reconnects: how often a peer has answered heartbeats again after that.

    For one thread at a time, the one that receives; but `describe_loss`, `explain`, `reason` and
    `may_live` may be called from any.
    """

    _network: Network
    _membership: Membership
    _limit: float
    _received: Mapping[MemberId, int]

    def __post_init__(self) -> None:
        self._counted = dict(self._received)
        self._detector = FailureDetector(self._limit)
        self._next_tick = 0.0
        self._retry_at = 0.0
        self._neighbours = [each for each in self._membership.infos if self._is_neighbour(each)]
        self.suspected: set[MemberId] = set()
        self.missed = self.reconnects = 0
        self._probes: dict[MemberId, ListenerProbe] = {}
        # Members of other hosts whose ports later members have: their processes have ended.
        self._displaced: set[MemberId] = set()
        # Why workers are gone, and a description of that: written before the membership marks them
        # as lost.
        self._losses: dict[MemberId, tuple[Reason, str]] = {}
        # The addresses of lost workers to which no connection was ever made.
        self._tried_in_vain: dict[MemberId, str] = {}
        # The members that have connected to this worker to see whether it lives.
        self._greeted: set[MemberId] = set()
        # Departed workers whose messages are still arriving: the reason, how many they sent, and
        # until when to wait for them.
        self._deferred_leaves: dict[MemberId, tuple[Reason, float, float]] = {}
        # Whether this worker may be the one that is cut off: it once had lost as many as it kept.
        self._isolated = False
        self._network.heartbeats.set_pace(self._detector.interval, self._detector.timeout)

    def add(self, member: MemberId) -> None:
        """Adds a worker that was introduced, also to the network."""
        if self._is_neighbour(member):
            self._neighbours.append(member)
        endpoint = self._network.endpoint(member)
        if endpoint.startswith("tcp://"):
            at_it = {other for other in self._counted if self._network.endpoint(other) == endpoint}
            self._displaced |= at_it - set(self._neighbours)
        self._counted[member] = 0

    def reason(self, member: MemberId) -> Reason | None:
        """Why a worker is gone; None if that was not found here. From any thread."""
        return self._losses[member][0] if member in self._losses else None

    def tick(self, everyone: bool) -> list[Loss]:
        """Monitors the peers; returns the new losses, each once. Must be called often.

        Args:
            everyone: whether to monitor also the workers that this one hears nothing of.
        """
        now = time.monotonic()
        if now < self._next_tick:
            return []
        self._next_tick = now + _TICK_SECONDS
        self._note_messages(self._received, now)
        for peer, answers in self._network.heartbeats.events():
            member = MemberId(peer)
            if answers:
                self.reconnects += self._detector.reached(member)
                self._detector.connected(member, now)
            else:
                self.missed += 1
                self._detector.disconnected(member, now)
        self._monitor_new_ones(now, everyone)
        self._check_processes(now)
        losses = self._detector.tick(now) + self._complete_leaves(now)
        for loss in losses:
            self._record_loss(loss)
        return losses

    def greeted(self, member: MemberId) -> None:
        """Notes that a peer has connected to this worker to see whether it lives."""
        self._greeted.add(member)

    def heard_that_it_leaves(self, member: MemberId) -> None:
        """Notes a peer's own message that it leaves, which is not counted among the others."""
        if member not in self._membership.lost:
            self._detector.heard(member, time.monotonic())

    def tried_in_vain(self, member: MemberId) -> str:
        """Returns the address of a lost worker if no connection to it was ever made, or ""."""
        return self._tried_in_vain.get(member, "")

    def explain(self, member: MemberId) -> str:
        """For error messages: says if no connection to or from a member exists. From any thread."""
        if member in self._membership.lost or not self._detector.monitors(member):
            return ""
        endpoint, own = self._network.endpoint(member), self._network.tcp_endpoint
        if not endpoint.startswith("tcp://"):
            return ""
        if not self._detector.reached(member):
            return f"; no connection to it at {endpoint} has been made so far"
        if not self._received.get(member) and member not in self._greeted:
            return f"; it has not connected to this worker at {own} so far"
        return ""

    def leave(
        self,
        member: MemberId,
        reason: Reason,
        sent: float = 0,
        tried: str = "",
        within: float = math.inf,
        why: str = "",
    ) -> Loss | None:
        """Notes that a peer is gone, as it or others say; returns None if that was known.

        Some of the messages that it has sent here may still be in flight, since large ones are
        overtaken. Then this returns None too, and the peer is gone in a later `tick`.

        Args:
            member: the peer.
            reason: why it is gone.
            sent: how many messages it has sent here; infinite if that is not known.
            tried: the address of this worker if the peer could never connect to it.
            within: how long to wait for these messages at most, in seconds.
            why: more about the reason.
        """
        now = time.monotonic()
        self._note_messages((member,), now)  # those since the last tick
        if self._received.get(member, sent) < sent:
            _, known, until = self._deferred_leaves.get(member, (reason, sent, math.inf))
            self._deferred_leaves[member] = reason, min(sent, known), min(now + within, until)
            return None
        loss = self._detector.declare_lost(member, reason, now)
        if loss is not None:
            self._record_loss(loss, tried, why)
        elif self.may_live(member) and reason in _FINAL:
            self._losses[member] = (reason, reason.value)
        return loss

    def may_live(self, member: MemberId) -> bool:
        """Whether a worker is lost, and its process may still run for all that is known here."""
        return self.reason(member) in _MAY_LIVE

    def _complete_leaves(self, now: float) -> list[Loss]:
        """Declares workers lost that have left, and whose messages are all in or late."""
        complete = [
            m
            for m, (_, sent, until) in self._deferred_leaves.items()
            if self._received[m] >= sent or now > until
        ]
        found = [
            self._detector.declare_lost(member, self._deferred_leaves.pop(member)[0], now)
            for member in complete
        ]
        return [loss for loss in found if loss is not None]

    def answers(self, member: MemberId) -> bool:
        """Whether a peer answers heartbeats at present."""
        return self._detector.answers(member)

    def silence(self, member: MemberId) -> float | None:
        """Returns the seconds since a peer's last sign of life; see `FailureDetector.silence`."""
        return self._detector.silence(member, time.monotonic())

    def describe_loss(self, member: MemberId) -> str:
        """Names a worker that is gone, why it is, and when it was last heard from. Any thread."""
        info = self._membership.infos[member]
        unknown = (None, f"{Reason.ENDED.value}, after its last message")
        _, why = self._losses.get(member, unknown)
        return f"worker {info.name} (rank {info.id}) is gone: {why}"

    def close(self) -> None:
        """Abandons the checks in progress."""
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()

    def _is_neighbour(self, member: MemberId) -> bool:
        return member != self._membership.own_id and self._membership.shares_host(member)

    def _note_messages(self, members: Iterable[MemberId], now: float) -> None:
        for member in members:
            count = self._received.get(member, 0)
            if count != self._counted.get(member, count):  # it has none if it is lost
                self._counted[member] = count
                self._detector.heard(member, now)

    def _monitor_new_ones(self, now: float, everyone: bool) -> None:
        """Monitors each peer that a message was exchanged with, or is expected from.

        And all that join if this worker may be cut off: they may have joined those that it lost.
        Nothing but their answer to heartbeats would tell it so, if it never calls them.
        """
        if not self._detector.limit or now < self._retry_at:
            return
        named = self.suspected.union(self._membership.living if self._isolated else ())
        for member, count in self._received.items():
            if (
                (count or everyone or member in named or self._network.knows(member))
                and member != self._membership.own_id
                and not self._detector.monitors(member)
                # Else first its predecessor at that port must be declared lost.
                and self._network.heartbeats.peer_at(self._network.endpoint(member)) is None
            ):
                try:
                    self._network.watch(member)
                except zmq.ZMQError as error:
                    # Out of descriptors, for example: its silence would be no sign.
                    logger.warning(
                        "%s can't be asked for heartbeats: %s",
                        self._membership.infos[member],
                        error,
                    )
                    self._retry_at = now + _RETRY_SECONDS
                    return
                self._detector.monitor(member, now)

    def _check_processes(self, now: float) -> None:
        for member in self._detector.to_check(self._neighbours):
            directory = Path(self._membership.records[member].directory)
            self._detector.checked(member, is_alive(directory), now)
        for member in self._displaced:
            self._detector.checked(member, False, now)
        checked = self._displaced.union(self._neighbours)
        for member in self._membership.living:
            if self._detector.suspects(member) and member not in checked:
                self._probe(member, now)

    def _probe(self, member: MemberId, now: float) -> None:
        """Checks from another host whether a worker's process has ended."""
        if not self._network.endpoint(member).startswith("tcp://"):
            return
        probe = self._probes.get(member)
        if probe is None:
            with contextlib.suppress(OSError):  # out of descriptors
                self._probes[member] = ListenerProbe(self._network.endpoint(member))
            return
        listening = probe.listening()
        if listening is not None:
            self._detector.checked(member, listening, now)
        if not probe.pending:
            self._probes.pop(member).close()

    def _record_loss(self, loss: Loss, tried: str = "", more: str = "") -> None:
        endpoint = self._network.endpoint(loss.member)
        why = loss.reason.value + more
        if loss.unreached and endpoint.startswith("tcp://"):
            self._tried_in_vain[loss.member] = endpoint
            if loss.reason is Reason.SILENT:
                why = _NO_WAY_THERE.format(endpoint=endpoint)
            elif loss.reason is Reason.ENDED:
                why += f", or a firewall refuses connections to it at {endpoint}"
        if loss.reason is Reason.SILENT:
            why += f" (heartbeat_timeout is {self._detector.limit:g} s)"
        if loss.reason is Reason.NO_WAY_BACK:
            why += _LET_IT_CONNECT.format(tried=tried)
        if loss.heard is None:
            last = "no message from it has ever arrived"
        else:
            ago = max(0.0, loss.at - loss.heard)
            clock = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
            last = f"it was last heard from at {clock}, {ago:.1f} s before this was known"
        self._losses[loss.member] = (loss.reason, f"{why}; {last}")
        self._deferred_leaves.pop(loss.member, None)
        self._counted.pop(loss.member, None)
        self._displaced.discard(loss.member)
        self._membership.mark_lost(loss.member)
        may_live = sum(map(self.may_live, self._losses))
        self._isolated |= may_live >= max(1, len(self._membership.living) - 1)
        if loss.member in self._neighbours:
            self._neighbours.remove(loss.member)
        self._network.heartbeats.forget(loss.member)
        if loss.member in self._probes:
            self._probes.pop(loss.member).close()
