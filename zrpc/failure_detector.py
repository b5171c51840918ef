"""When a worker is given up: the rules. No I/O in here: signs of life go in, losses come out.

There are three ways to know of a peer. Its *messages*. Its *heartbeats*: a connection on which
it answers without its Python's help, as ZeroMQ's do; while that stands, the peer
is alive. And, on the same host, a *look* at the lock that its process holds.

- A peer whose lock is free at two looks in a row has ended. Two, so that what it sent at the very
  end is read first. A refused connection counts as such a look at a peer of another host.
- A peer that is watched, whose heartbeats have stopped, and of which nothing else is heard for the
  limit, is silent: its process is stopped, or the network is cut. It is given up, and stays so.

This worker may itself be stopped, or its Python be held up, for any time. So a gap between two
looks at the clock is nobody's silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["FailureDetector", "Loss", "Reason"]

# In parts of the limit. A peer that stops right after an answer is asked once more an interval
# later, and its connection breaks a timeout after that. Then it has the rest of its patience to
# come back by a new connection. What is left is for the clock's coarseness: within the limit, it
# is noticed.
_INTERVAL = 0.2
_TIMEOUT = 0.4
_PATIENCE = 0.9
# A longer time between two ticks is a gap.
_GAP = 0.25

_LOOKS_TO_BELIEVE = 2
# How many peers that are not suspected are looked at in a tick, in turn.
_LOOKS_A_TICK = 8


class Reason(Enum):
    """Why a worker is gone."""

    ENDED = "its process has ended, or has closed its agent"
    LEFT = "it left the mesh"
    GAVE_UP = "it has given up this worker, of which it had heard nothing, and takes no more calls"
    REPLACED = "it has ended, and was started again"
    REFUSED = "it is not trusted"
    SILENT = "it answers no more: its process is stopped, or the network to it is cut"


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker is gone.

    Attributes:
        rank: which.
        reason: why.
        at: when that was found, on the clock that `FailureDetector` was given.
        heard: when the worker was last heard, on the same clock; None for never.
    """

    rank: int
    reason: Reason
    at: float
    heard: float | None


class _Peer:
    """What is known of one peer."""

    __slots__ = ("alive_at", "connected", "dead_looks", "heard", "since", "watched")

    def __init__(self) -> None:
        self.heard: float | None = None
        self.watched = False
        self.connected = False
        self.since = 0.0  # of a watched peer that is not connected: from when silence counts
        # When its connection broke, as its end does, or a look found it alive.
        self.alive_at: float | None = None
        self.dead_looks = 0

    @property
    def silent_since(self) -> float:
        """From when on nothing was heard; of a watched peer that is not connected."""
        return self.since if self.heard is None else max(self.since, self.heard)


class FailureDetector:
    """Finds out which peers are gone. For one thread at a time.

    Args:
        limit: how long a peer may be silent, in seconds; 0 for any time.

    All times are in seconds, on one clock of the caller's that does not go back.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._peers: dict[int, _Peer] = {}
        self._lost: set[int] = set()
        self._ended: list[int] = []
        self._next_look = 0
        self._last_tick: float | None = None

    @property
    def interval(self) -> float:
        """How often a peer is to be asked for a heartbeat."""
        return self.limit * _INTERVAL

    @property
    def timeout(self) -> float:
        """After which time without an answer the heartbeats' connection is to be broken."""
        return self.limit * _TIMEOUT

    def watches(self, rank: int) -> bool:
        """Whether a peer is asked for heartbeats, or is gone."""
        return rank in self._lost or (rank in self._peers and self._peers[rank].watched)

    def watch(self, rank: int, now: float) -> None:
        """A peer is asked for heartbeats from now on."""
        peer = self._peer(rank)
        peer.watched = True
        peer.since = now

    def heard(self, rank: int, now: float) -> None:
        """Messages of a peer came in."""
        self._peer(rank).heard = now

    def connected(self, rank: int, now: float) -> None:
        """A peer answers heartbeats."""
        peer = self._peer(rank)
        peer.connected = True
        peer.heard = now
        peer.dead_looks = 0

    def disconnected(self, rank: int, now: float) -> None:
        """The connection of a peer's heartbeats has broken, or timed out."""
        peer = self._peer(rank)
        if not peer.connected:
            return
        peer.connected = False
        # It was asked all the time until then, and has answered all but the last time.
        peer.since = max(peer.since, now - self.interval - self.timeout)
        peer.heard = peer.since = peer.silent_since
        peer.alive_at = now

    def looked(self, rank: int, lives: bool, now: float) -> None:
        """The result of a look at a peer's process."""
        if rank in self._lost:
            return
        peer = self._peer(rank)
        peer.dead_looks = 0 if lives else peer.dead_looks + 1
        if lives:
            peer.alive_at = now
        if peer.dead_looks == _LOOKS_TO_BELIEVE:
            self._ended.append(rank)

    def to_look_at(self, candidates: Iterable[int]) -> list[int]:
        """Which of some peers to look at now: all that are suspected, and a few of the others."""
        suspected: list[int] = []
        others: list[int] = []
        for rank in candidates:
            if rank not in self._lost:
                (suspected if self.suspects(rank) else others).append(rank)
        count = min(_LOOKS_A_TICK, len(others))
        start = self._next_look % len(others) if others else 0
        self._next_look = start + count
        return suspected + (others + others)[start : start + count]

    def suspects(self, rank: int) -> bool:
        """Whether there is a sign that a peer might be gone."""
        peer = self._peers.get(rank)
        return peer is not None and (peer.dead_looks > 0 or peer.watched > peer.connected)

    def tick(self, now: float) -> list[Loss]:
        """Tells who is gone, each once; to be called often, after all that is to be told here."""
        gap = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        silent = []
        for rank, peer in self._peers.items():
            if not self.limit or not peer.watched or peer.connected:
                continue
            if gap > self.limit * _GAP:
                peer.since = peer.silent_since + gap
            if now - peer.silent_since >= self.limit * _PATIENCE:
                silent.append(rank)
        losses = [self.lose(rank, Reason.ENDED, now) for rank in self._ended]
        losses += [self.lose(rank, Reason.SILENT, now) for rank in silent]
        self._ended.clear()
        return [loss for loss in losses if loss is not None]

    def lose(self, rank: int, reason: Reason, now: float) -> Loss | None:
        """A peer is gone; None where that was known."""
        if rank in self._lost:
            return None
        self._lost.add(rank)
        peer = self._peers.pop(rank, None)
        heard = None if peer is None else peer.heard
        if peer is not None and reason is Reason.ENDED and peer.alive_at is not None:
            # A process that is stopped is alive in this way too, but it has not ended.
            heard = peer.alive_at if heard is None else max(peer.alive_at, heard)
        return Loss(rank, reason, now, heard)

    def _peer(self, rank: int) -> _Peer:
        return self._peers.setdefault(rank, _Peer())
