"""When a worker is declared dead: the rules. No I/O here: signs of life go in, losses come out.

There are three sources about a peer. Its *messages*. Its *heartbeats*: a connection on which it
answers without its Python's help, as ZeroMQ's do; while that stands, the peer is alive. And, on the
same host, a *check* of the lock that its process holds.

- A peer whose lock is free in two checks in a row has ended. Two, so that what it sent at the very
  end is read first. A refused connection counts as such a check of a peer on another host.
- A monitored peer is silent if its heartbeats have stopped and nothing else is heard of it for the
  limit: its process is stopped, or the network is cut. It is declared dead, and stays so.
- If many connections are begun at once, each waits for the others, on a busy machine longer than
  the limit. So while peers that were asked at about the same time answer for the first time, one
  after another, a peer that has not yet answered is not silent.

This worker may itself be stopped, or its Python be held up, for any time. So a gap between two
ticks does not count as a peer's silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from zrpc.wire.member_id import MemberId

# Fractions of the limit. A peer that stops right after an answer is asked once more an interval
# later, and its connection breaks a timeout after that. It then has until `_SILENCE` to come back
# by a new connection. The rest is for the coarseness of the clock: the loss is found within the
# limit.
_INTERVAL = 0.2
_TIMEOUT = 0.4
_SILENCE = 0.9
# Peers that are asked within this time are asked at about the same time.
_AT_ONCE = 0.5
# A longer time between two ticks is a gap. If the limit is short, ticks come about every 0.1 s too,
# or a bit later on a busy machine.
_GAP = 0.25
_LEAST_GAP_SECONDS = 0.25

_CHECKS_TO_BELIEVE = 2
# How many peers without a sign of trouble are checked in a tick, in rotation.
_CHECKS_PER_TICK = 8


class Reason(Enum):
    """Why a worker is gone."""

    ENDED = "its process has exited, or has left the mesh without notice"
    LEFT = "it left the mesh"
    DECLARED_DEAD = (
        "it has declared this worker dead, since it had heard nothing from it, and takes no more "
        "calls"
    )
    REPLACED = "it has ended, and was started again"
    REFUSED = "it is not trusted"
    PUT_OUT = "it was put out of the mesh"
    OUT = "this worker was put out of the mesh"
    NO_WAY_BACK = "it could not connect to this worker, and takes no more calls"
    SILENT = "it no longer answers: its process is stopped, or the network to it is cut"


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker is gone."""

    member: MemberId
    reason: Reason
    # When that was found, and when the worker was last heard, on the detector's clock.
    at: float
    heard: float | None
    # Whether it was asked for heartbeats, and never answered one.
    unreached: bool = False


@dataclass(slots=True)
class _Peer:
    """What is known of one peer."""

    heard: float | None = None
    monitored: bool = False
    connected: bool = False
    asked_at: float = 0.0  # when it was first monitored
    reached_at: float | None = None  # when it was first connected
    since: float = 0.0  # start of the silence of a monitored peer that is not connected
    # When a check found it alive, or its connection broke, as its exit breaks it.
    alive_at: float | None = None
    dead_checks: int = 0

    @property
    def silent_since(self) -> float:
        """Since when nothing was heard of a monitored peer that is not connected."""
        return self.since if self.heard is None else max(self.since, self.heard)


class FailureDetector:
    """Finds out which peers are gone. For one thread at a time.

    Args:
        limit: how long a peer may be silent, in seconds; 0 for no limit.

    All times are in seconds, on one clock of the caller's that does not go back.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._peers: dict[MemberId, _Peer] = {}
        self._lost: set[MemberId] = set()
        self._ended: list[MemberId] = []
        self._next_check = 0
        self._last_tick: float | None = None

    @property
    def interval(self) -> float:
        """The time between two heartbeats that a peer is asked for."""
        return self.limit * _INTERVAL

    @property
    def timeout(self) -> float:
        """The time without an answer after which the heartbeats' connection must be broken."""
        return self.limit * _TIMEOUT

    def monitors(self, member: MemberId) -> bool:
        """Whether a peer is asked for heartbeats, or is gone."""
        return member in self._lost or (member in self._peers and self._peers[member].monitored)

    def reached(self, member: MemberId) -> bool:
        """Whether a peer ever answered a heartbeat. From any thread."""
        peer = self._peers.get(member)
        return peer is not None and peer.reached_at is not None

    def answers(self, member: MemberId) -> bool:
        """Whether a peer answers heartbeats at present."""
        peer = self._peers.get(member)
        return peer is not None and peer.connected

    def silence(self, member: MemberId, now: float) -> float | None:
        """Returns the seconds since a peer's last sign of life; None if it never gave one.

        It is 0 while its heartbeats' connection stands. From any thread.
        """
        peer = self._peers.get(member)
        if peer is None or (heard := peer.heard) is None:
            return None
        return 0.0 if peer.connected else max(0.0, now - heard)

    def monitor(self, member: MemberId, now: float) -> None:
        """Notes that a peer is asked for heartbeats from now on."""
        peer = self._peer(member)
        peer.monitored = True
        peer.since = peer.asked_at = now

    def heard(self, member: MemberId, now: float) -> None:
        """Notes that messages of a peer came in."""
        self._peer(member).heard = now

    def connected(self, member: MemberId, now: float) -> None:
        """Notes that a peer answers heartbeats."""
        peer = self._peer(member)
        peer.connected = True
        if peer.reached_at is None:
            peer.reached_at = now
        peer.heard = now
        peer.dead_checks = 0

    def disconnected(self, member: MemberId, now: float) -> None:
        """Notes that the connection of a peer's heartbeats has broken, or timed out."""
        peer = self._peer(member)
        if not peer.connected:
            return
        peer.connected = False
        # It was asked all the time until then, and has answered all but the last time.
        peer.since = max(peer.since, now - self.interval - self.timeout)
        peer.heard = peer.since = peer.silent_since
        peer.alive_at = now

    def checked(self, member: MemberId, alive: bool, now: float) -> None:
        """Notes the result of a check of a peer's process."""
        if member in self._lost:
            return
        peer = self._peer(member)
        peer.dead_checks = 0 if alive else peer.dead_checks + 1
        if alive:
            peer.alive_at = now
        if peer.dead_checks == _CHECKS_TO_BELIEVE:
            self._ended.append(member)

    def to_check(self, candidates: Iterable[MemberId]) -> list[MemberId]:
        """Returns the peers to check now: all that are suspected, and a few of the others."""
        suspected: list[MemberId] = []
        others: list[MemberId] = []
        for member in candidates:
            if member not in self._lost:
                (suspected if self.suspects(member) else others).append(member)
        count = min(_CHECKS_PER_TICK, len(others))
        start = self._next_check % len(others) if others else 0
        self._next_check = start + count
        return suspected + (others + others)[start : start + count]

    def suspects(self, member: MemberId) -> bool:
        """Whether there is a sign that a peer might be gone."""
        peer = self._peers.get(member)
        return peer is not None and (peer.dead_checks > 0 or peer.monitored > peer.connected)

    def tick(self, now: float) -> list[Loss]:
        """Returns the new losses, each once.

        Must be called often, after everything that has happened was reported here.
        """
        gap = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        silent = []
        for member, peer in self._peers.items():
            if not self.limit or not peer.monitored or peer.connected:
                continue
            if gap > max(self.limit * _GAP, _LEAST_GAP_SECONDS):
                peer.since = peer.silent_since + gap
            allowed = self.limit * _SILENCE
            if now - peer.silent_since >= allowed and now - self._last_before(peer) >= allowed:
                silent.append(member)
        losses = [self.declare_lost(member, Reason.ENDED, now) for member in self._ended]
        losses += [self.declare_lost(member, Reason.SILENT, now) for member in silent]
        self._ended.clear()
        return [loss for loss in losses if loss is not None]

    def _last_before(self, peer: _Peer) -> float:
        """Returns the time of the latest first answer among the peers asked by then.

        That is when this one answered, if it ever has.
        """
        if peer.reached_at is not None:
            return peer.reached_at
        end = peer.asked_at + self.limit * _AT_ONCE
        asked = [p for p in self._peers.values() if p.asked_at <= end]
        return max((p.reached_at for p in asked if p.reached_at is not None), default=-math.inf)

    def declare_lost(self, member: MemberId, reason: Reason, now: float) -> Loss | None:
        """Notes that a peer is gone; returns None if that was known."""
        if member in self._lost:
            return None
        self._lost.add(member)
        peer = self._peers.pop(member, None)
        heard = None if peer is None else peer.heard
        if peer is not None and reason is Reason.ENDED and peer.alive_at is not None:
            # A process that is stopped is alive in this way too, but it has not ended.
            heard = peer.alive_at if heard is None else max(peer.alive_at, heard)
        unreached = peer is not None and peer.monitored and peer.reached_at is None
        return Loss(member, reason, now, heard, unreached)

    def _peer(self, member: MemberId) -> _Peer:
        return self._peers.setdefault(member, _Peer())
