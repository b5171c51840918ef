"""How a worker joins and leaves a mesh that runs, and learns of others that do.

First it *claims* its name and its rank, in the log (``zrpc.services.elastic.log``, whose rules are
those of ``zrpc.services.elastic.state``). With the member id that it then has, its agent starts,
and all members introduce it as they read the log. Once all have noted that, it announces that it is
in. Once all have noted that too, it can be found everywhere.

One thread of each worker reads the log, several times a second, since not every store has an event
for a new entry. It uses the store alone, and appends what this worker must report. Changes to the
agent are made in the agent's I/O thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.membership.endpoints import endpoint_of
from zrpc.membership.failure_detector import Reason
from zrpc.membership.launched import ended_error, stop_error
from zrpc.membership.missing_ranks import describe_hosts, describe_missing
from zrpc.membership.peer_record import PeerRecord
from zrpc.services.elastic.log import MembershipLog
from zrpc.services.elastic.state import Change, MembershipEvent, MembershipState, Verb
from zrpc.wire.member_id import MemberId

logger = logging.getLogger(__name__)


class _Admission:
    """How this worker comes into its mesh, in three steps.

    All members read that it asks to join; it announces that it is in; all members read that.
    Its methods run in the follower's thread, but for `wait`.
    """

    def __init__(self, agent: Agent, state: MembershipState) -> None:
        self._agent = agent
        self._state = state
        self._record = agent.membership.records[agent.membership.own_id]
        self._pause = state.limits.pause_seconds[0]
        self._announced = False
        self._complete_at = 0  # the position of the log at which all were in
        self._noted_positions: dict[MemberId, int] = {}  # of the others, as read last
        self._return_until = time.monotonic() + state.limits.return_seconds
        self._check_after = time.monotonic() + state.limits.check_after_seconds
        self._outcome: Future[None] = Future()

    @property
    def settled(self) -> bool:
        """Whether this worker is in, or has failed to come in."""
        return self._outcome.done()

    @property
    def complete(self) -> bool:
        """Whether this worker is in."""
        return self.settled and self._outcome.exception() is None

    def wait(self, deadline: float, timeout: float) -> None:
        """Waits until this worker is in, and in a mesh of a fixed size all are.

        Raises:
            RendezvousError: it took longer; the store failed.
            AuthenticationError: a member does not trust this worker.
        """
        try:
            self._outcome.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise RendezvousError(self._too_late(timeout)) from None

    def fail(self, error: RpcError) -> None:
        """Ends the admission with an error, unless it is settled."""
        if not self.settled:
            self._outcome.set_exception(error)

    def next_pause(self) -> float:
        """Returns how long to wait before the next `advance`, in seconds."""
        self._pause = min(2 * self._pause, self._state.limits.pause_seconds[1])
        return self._pause

    def advance(self, log: MembershipLog) -> None:
        """Takes the next step, if all members have read of the one before."""
        if (error := stop_error()) is not None:
            self.fail(error)
        elif not self._announced:
            if self._all_have_read(log, self._state.joined_at(self._record.token)):
                self._announced = log.append(MembershipEvent(Verb.IN, self._record.token))
                self._pause = self._state.limits.pause_seconds[0]
        elif self._complete_at or self._is_complete():
            # Those that come in first may leave again before this worker is in.
            self._complete_at = self._complete_at or self._state.position
            if self._all_have_read(log, self._complete_at):
                self._outcome.set_result(None)
        elif (error := self._ended()) is not None:
            self.fail(error)
        elif time.monotonic() > self._return_until:
            # The others may have finished before this worker came back.
            left = self._state.left_during_restart(self._record)
            if left:
                text = (
                    f"the mesh of {self._record.info} has ended while this worker was restarted: "
                    f"{left} have shut down and left it"
                )
                self.fail(RendezvousError(text))

    def _is_complete(self) -> bool:
        return self._record.member_id in self._state.admitted and not self._state.missing

    def _ended(self) -> RendezvousError | None:
        own = self._record
        return ended_error(self._state.missing, own.rank, own.world_size)

    def _all_have_read(self, log: MembershipLog, position: int) -> bool:
        """Whether all other members that are not lost have read up to a position."""
        lost = self._agent.membership.lost
        check = time.monotonic() > self._check_after
        late: list[MemberId] = []
        for member, record in self._state.members.items():
            if member == self._record.member_id or member in lost:
                continue
            if self._noted_positions.get(member, 0) < position:
                self._noted_positions[member] = log.noted_position(record.token)
            if self._noted_positions[member] < position:
                late.append(member)
                if not check:
                    break  # the others can be asked when this one has read it
        if late and check:
            self._agent.liveness.suspected.update(late)  # are they alive?
        return not late

    def _too_late(self, timeout: float) -> str:
        own, size = self._record, self._record.world_size
        others = [r for r in list(self._state.members.values()) if r.member_id != own.member_id]
        come = [own, *others]  # also those that not all have read of yet
        missing = set(range(size or 0)).difference(record.rank for record in come)
        if left := [info for info in self._state.left() if info.id in missing]:
            return (
                f"expected {size} workers within {timeout:g} s, but {left} have shut down and not "
                "come back: if they have finished, there is no mesh left to join"
            )
        if missing:
            return (
                f"expected {size} workers within {timeout:g} s, but {describe_missing(missing)}; "
                f"{describe_hosts(come)}"
            )
        return (
            f"expected all members of the mesh to know worker {self._record.name} within "
            f"{timeout:g} s, but some did not answer. The others are {[r.info for r in others]}"
        )


class LogFollower(threading.Thread):
    """The thread that reads the log: it alone uses that, and changes the state."""

    def __init__(self, agent: Agent, log: MembershipLog, state: MembershipState) -> None:
        self._record = agent.membership.records[agent.membership.own_id]
        super().__init__(name=f"zrpc-{self._record.name}-log", daemon=True)
        self._agent = agent
        self._log = log
        self._state = state
        self.admission = _Admission(agent, state)
        # Losses to report in the log, why, and details: appended in this thread and in the I/O
        # thread, taken in this one.
        self._losses: deque[tuple[MemberId, Reason, str]] = deque()
        self._noted = -1
        self._awaiting_until = 0.0
        self._closing = False
        self._out = False  # whether the mesh goes on without this worker
        self._wake = threading.Event()

    def report_loss(self, member: MemberId, why: Reason) -> None:
        """Queues the loss of a worker to report in the log. From any thread."""
        self._losses.append((member, why, ""))
        self._wake.set()

    def close(self) -> None:
        """Announces that this worker leaves, and ends the thread."""
        self._closing = True
        self._wake.set()
        if self.ident is not None:
            self.join(2 * self._state.limits.leave_seconds)
        del self._log  # the store closes with its last user, if this worker hosts it

    @override
    def run(self) -> None:
        try:
            while not self._closing and not self._out:
                self._follow()
                self._wake.wait(self._next_pause())
                self._wake.clear()
            self._announce_leave()
        except (RuntimeError, OSError) as error:
            self._on_store_failure(error)
        except Exception as error:  # no thread must wait for this one in vain
            logger.exception("%s no longer reads the log of its mesh", self._record.info)
            self.admission.fail(RendezvousError(f"the log of the mesh can't be read: {error}"))

    def _next_pause(self) -> float:
        if not self.admission.settled:
            return self.admission.next_pause()
        limits = self._state.limits
        awaiting = self._agent.membership.awaited and time.monotonic() < self._awaiting_until
        return limits.awaiting_poll_seconds if awaiting else limits.poll_seconds

    def _follow(self) -> None:
        """Reads what is new, and appends what this worker must report."""
        entries = self._log.read()
        changes = [change for entry in entries for change in self._state.apply(entry)]
        if entries and not self._hand_over(changes):
            return  # the agent closes
        if not self._append_losses():
            return  # not before the log is read again
        is_member = self._record.member_id in self._state.members
        if self._noted != self._state.position:
            self._noted = self._state.position
            if is_member:
                self._log.note_position(self._record.token, self._noted)
            else:
                self._log.withdraw_position(self._record.token)
        if not self.admission.settled and is_member:
            self.admission.advance(self._log)
        if entries and is_member:
            others = self._state.members.keys() - self._agent.membership.lost
            self._log.compact(self._state, sum(m < self._record.member_id for m in others))

    def _append_losses(self) -> bool:
        """Reports losses in the log; returns False if one must be tried again."""
        while self._losses:
            member, why, text = self._losses[0]
            record = self._state.members.get(member)
            if record is not None:
                gone = MembershipEvent(Verb.GONE, record.token, why=why, text=text)
                if not self._log.append(gone):
                    return False
            self._losses.popleft()
        return True

    def _hand_over(self, changes: list[Change]) -> bool:
        """Makes changes in the I/O thread and waits for that; returns False if the agent closes."""
        starts = dict(self._state.starts)
        jobs: list[Callable[[], object]] = []
        for change in changes:
            if change.record.member_id != self._record.member_id:
                jobs.append(self._job(change))
            elif change.verb is Verb.GONE and not self._closing:
                # No later change concerns it. Those that join do not count it.
                self._out = True
                jobs.append(partial(self._agent.peers.drop_all, self._on_own_loss(change)))
                break
        done = threading.Event()

        def make_changes() -> None:
            try:
                for job in jobs:
                    job()
                # Workers may have come and gone that the changes do not contain.
                self._agent.membership.starts = starts
            finally:
                done.set()

        self._agent.receiver.in_io_thread(make_changes)
        while not done.wait(self._state.limits.poll_seconds):
            if self._closing:
                return False
        return True

    def _job(self, change: Change) -> Callable[[], object]:
        """Returns what makes a change to the agent, in the I/O thread."""
        peers, member = self._agent.peers, change.record.member_id
        if change.verb is Verb.JOIN:
            return partial(peers.introduce, change.record, self._endpoint_of(change.record))
        if change.verb is Verb.IN:
            return partial(peers.admit, member)
        assert change.why is not None
        return partial(self._drop, member, change.why)

    def _drop(self, member: MemberId, why: Reason) -> None:
        agent = self._agent
        # As in the farewell of the worker that leaves: its first message may be the last one, too.
        talked = agent.network.knows(member) or agent.dispatcher.received.get(member)
        waits = why is Reason.LEFT and talked
        agent.peers.remove(member, why, self._state.limits.last_message_seconds if waits else 0.0)

    def _endpoint_of(self, record: PeerRecord) -> str:
        """Returns where a worker that is about to join can be reached; empty if it is refused."""
        self._awaiting_until = time.monotonic() + self._state.limits.awaiting_seconds
        try:
            return endpoint_of(self._agent.membership, record)
        except RpcError as error:
            if self._record.member_id in self._state.admitted:
                logger.warning("%s refuses %s: %s", self._record.info, record.info, error)
                self._losses.append((record.member_id, Reason.REFUSED, str(error)))
            else:
                self.admission.fail(error)  # the newer of the two has to fit
            return ""

    def _on_own_loss(self, change: Change) -> str:
        """Reports that this worker is no longer a member, and returns why."""
        text = change.text or f"others report: {(change.why or Reason.ENDED).value}"
        trouble = f"{self._record.info} is no longer a member of its mesh: {text}"
        refused = change.why is Reason.REFUSED
        self.admission.fail(AuthenticationError(trouble) if refused else RendezvousError(trouble))
        logger.error(trouble)
        return text

    def _announce_leave(self) -> None:
        own_id = self._record.member_id
        # One that gives up was never there to leave: if it is started again, it learns that others
        # left before.
        why = Reason.LEFT if self.admission.complete else Reason.ENDED
        gone = MembershipEvent(Verb.GONE, self._record.token, why=why)
        while own_id in self._state.members and not self._log.append(gone):
            self._log.catch_up(self._state)
        if own_id not in self._state.members or not self._agent.graceful_shutdown.done:
            return
        # All leave together. A worker that comes back at once must not find one that is leaving.
        deadline = time.monotonic() + self._state.limits.leave_seconds
        pause, longest = self._state.limits.pause_seconds
        lost = self._agent.membership.lost
        while self._state.members.keys() - lost and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, longest)
            self._log.catch_up(self._state)

    def _on_store_failure(self, error: Exception) -> None:
        trouble = f"the store of the mesh fails: {error}"
        self.admission.fail(RendezvousError(trouble))
        if not self._closing:
            logger.warning(
                "%s: %s. The mesh goes on, but workers can no longer join it; `zrpc launch "
                "--elastic` hosts a store for as long as a worker of that launch runs",
                self._record.info,
                trouble,
            )


class ElasticMembership(Service):
    """Keeps an agent's view of its mesh as the log says.

    Its methods run in the I/O thread, but for `close`. At first the agent
    knows no other worker, and the state is that in which its worker was accepted.

    Attributes:
        follower: reads the log; must be started when the agent serves.
    """

    def __init__(self, agent: Agent, log: MembershipLog, state: MembershipState) -> None:
        super().__init__(agent)
        self.follower = LogFollower(agent, log, state)
        agent.membership.starts = dict(state.starts)
        for record, why in state.departed.values():
            # Others may still pass on references that it owned.
            agent.peers.introduce(record, "")
            agent.peers.remove(record.member_id, why)
        for member, record in state.members.items():
            if member == agent.membership.own_id:
                continue
            agent.peers.introduce(record, endpoint_of(agent.membership, record))
            if member in state.admitted:
                agent.peers.admit(member)

    @override
    def on_member_lost(self, member: MemberId) -> None:
        """Reports the loss of a peer in the log, if this worker has seen or decided it."""
        self.agent.joined.forget(member)
        if not self.agent.liveness.may_live(member):
            self.agent.network.dismiss(member)
        reason, verdict = self.agent.liveness.reason(member), self.agent.peers.verdict(member)
        if reason is Reason.ENDED or (verdict and verdict.judge == self.agent.membership.own_id):
            self.follower.report_loss(member, reason or Reason.ENDED)

    @override
    def close(self) -> None:
        self.follower.close()
