"""How a worker keeps watch over its peers: the I/O around `zrpc.failure_detector`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import zmq

from zrpc.failure_detector import FailureDetector, Loss, Reason
from zrpc.membership import Membership
from zrpc.transport.address import is_alive
from zrpc.transport.network import Network
from zrpc.transport.probe import ListenerProbe

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

# How often to look, in seconds; and when to try again what the system did not allow.
_EVERY = 0.1
_RETRY_AFTER = 1.0
# After this time, in seconds, the leader of a shutdown watches those that it hears nothing of.
_LEADER_WATCHES_AFTER = 1.0


class Watch:
    """Finds out which peers of one worker are gone.

    Args:
        network: the worker's.
        membership: the worker's; those that are gone are marked there.
        limit: how long a peer may be silent, in seconds; 0 for any time.
        received: how many messages came of each worker that is not gone, kept by the agent.

    For one thread at a time, that which receives; but `epitaph` may be called from any.
    """

    def __init__(
        self, network: Network, membership: Membership, limit: float, received: Mapping[int, int]
    ) -> None:
        self._network = network
        self._membership = membership
        self._received = received
        self._counted = dict(received)
        self._detector = FailureDetector(limit)
        self._next = 0.0
        self._retry_at = 0.0
        self._leading_since: float | None = None
        self._neighbours = [rank for rank in membership.infos if self._is_neighbour(rank)]
        # Those to be watched before anything was sent to them or came from them.
        self.expected: set[int] = set()
        self._probes: dict[int, ListenerProbe] = {}
        # By number, written before the membership marks the worker as lost.
        self._epitaphs: dict[int, str] = {}
        self._reasons: dict[int, Reason] = {}
        # What those said that are gone when all is in that they have sent.
        self._farewells: dict[int, tuple[Reason, int]] = {}
        network.heartbeats.set_pace(self._detector.interval, self._detector.timeout)

    def add(self, rank: int) -> None:
        """One more worker is introduced."""
        self._counted[rank] = 0
        if self._is_neighbour(rank):
            self._neighbours.append(rank)

    def reason(self, rank: int) -> Reason | None:
        """Why a worker is gone; None where that was not found here. From any thread."""
        return self._reasons.get(rank)

    def tick(self, leading: bool) -> list[Loss]:
        """Looks after the peers; returns those found gone, each once. To be called often.

        Args:
            leading: whether this worker leads a shutdown, and so waits for all others.
        """
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + _EVERY
        self._note_messages(now)
        for rank, answers in self._network.heartbeats.events():
            (self._detector.connected if answers else self._detector.disconnected)(rank, now)
        self._watch_new_ones(now, self._waits_for_all(leading, now))
        self._look(now)
        losses = self._detector.tick(now) + self._last_words_heard(now)
        for loss in losses:
            self._bury(loss)
        return losses

    def leave(self, rank: int, reason: Reason, sent: int = 0) -> Loss | None:
        """A peer has said that it is gone.

        Args:
            rank: which.
            reason: why.
            sent: how many messages it has sent here. They may still come in, as large ones are
                overtaken; then it is gone in a later `tick`.

        Returns:
            None where that was known, or is not to be believed yet.
        """
        if self._received.get(rank, sent) < sent:
            self._farewells[rank] = (reason, sent)
            return None
        loss = self._detector.lose(rank, reason, time.monotonic())
        if loss is not None:
            self._bury(loss)
        return loss

    def _last_words_heard(self, now: float) -> list[Loss]:
        heard = [n for n, (_, sent) in self._farewells.items() if self._received[n] >= sent]
        found = [self._detector.lose(n, self._farewells.pop(n)[0], now) for n in heard]
        return [loss for loss in found if loss is not None]

    def epitaph(self, rank: int) -> str:
        """Who is gone, why, and when it was last heard."""
        info = self._membership.infos[rank]
        why = self._epitaphs.get(rank, f"{Reason.ENDED.value}, after its last message")
        return f"worker {info.name} (rank {info.id}) is gone: {why}"

    def close(self) -> None:
        """Ends what is under way."""
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()

    def _is_neighbour(self, rank: int) -> bool:
        return rank != self._membership.rank and self._membership.shares_host(rank)

    def _note_messages(self, now: float) -> None:
        for rank, count in self._received.items():
            if count != self._counted[rank]:
                self._counted[rank] = count
                self._detector.heard(rank, now)

    def _waits_for_all(self, leading: bool, now: float) -> bool:
        if not leading:
            self._leading_since = None
        elif self._leading_since is None:
            self._leading_since = now
        else:
            return now - self._leading_since > _LEADER_WATCHES_AFTER
        return False

    def _watch_new_ones(self, now: float, everyone: bool) -> None:
        """Watches who was ever sent to, who has sent anything, and who is expected to."""
        if not self._detector.limit or now < self._retry_at:
            return
        for rank, count in self._received.items():
            if (
                (count or everyone or rank in self.expected or self._network.knows(rank))
                and rank != self._membership.rank
                and not self._detector.watches(rank)
            ):
                try:
                    self._network.watch(rank)
                except zmq.ZMQError as error:
                    # Out of descriptors, say: its silence would be no sign. Once more, later.
                    logger.warning("No heartbeats of rank %d can be had: %s", rank, error)
                    self._retry_at = now + _RETRY_AFTER
                    return
                self._detector.watch(rank, now)

    def _look(self, now: float) -> None:
        for rank in self._detector.to_look_at(self._neighbours):
            directory = Path(self._membership.cards[rank].directory)
            self._detector.looked(rank, is_alive(directory), now)
        for rank in self._membership.living:
            if self._detector.suspects(rank) and rank not in self._neighbours:
                self._probe(rank, now)

    def _probe(self, rank: int, now: float) -> None:
        """Looks from afar whether a worker's process has ended."""
        if not self._network.endpoint(rank).startswith("tcp://"):
            return
        probe = self._probes.get(rank)
        if probe is None:
            with contextlib.suppress(OSError):  # out of descriptors
                self._probes[rank] = ListenerProbe(self._network.endpoint(rank))
            return
        listening = probe.listening()
        if listening is not None:
            self._detector.looked(rank, listening, now)
        if not probe.pending:
            self._probes.pop(rank).close()

    def _bury(self, loss: Loss) -> None:
        why = loss.reason.value
        if loss.reason is Reason.SILENT:
            why += f" (heartbeat_timeout is {self._detector.limit:g} s)"
        if loss.heard is None:
            last = "it was never heard"
        else:
            ago = max(0.0, loss.at - loss.heard)
            clock = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
            last = f"it was last heard at {clock}, {ago:.1f} s before this was known"
        self._epitaphs[loss.rank] = f"{why}; {last}"
        self._reasons[loss.rank] = loss.reason
        self._farewells.pop(loss.rank, None)
        self._counted.pop(loss.rank, None)
        self._membership.lose(loss.rank)
        if loss.rank in self._neighbours:
            self._neighbours.remove(loss.rank)
        self._network.heartbeats.forget(loss.rank)
        probe = self._probes.pop(loss.rank, None)
        if probe is not None:
            probe.close()
