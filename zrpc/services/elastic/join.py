"""How a worker joins a mesh that may run already: by an event in its log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.errors import RendezvousError
from zrpc.membership.device_maps import check_device_maps
from zrpc.membership.endpoints import Meeting, announce_endpoint, is_loopback
from zrpc.membership.failure_detector import Reason
from zrpc.membership.init_method import hosted_by_rank_0
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.rendezvous import store_errors
from zrpc.membership.signed_store import SignedStore
from zrpc.membership.view import Membership
from zrpc.services.elastic.follower import ElasticMembership
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.services.elastic.log import MembershipLog
from zrpc.services.elastic.state import MembershipEvent, MembershipState, Verb
from zrpc.transport.address import is_alive
from zrpc.transport.probes import ListenerProbe


def join_running(
    record: PeerRecord,
    meeting: Meeting,
    services: Sequence[Callable[[Agent], Service]],
    limits: ElasticLimits,
) -> Agent:
    """Joins a mesh that may run already; returns this worker's agent.

    Raises as `join_mesh`; the network is closed then if there was an agent.
    """
    deadline = time.monotonic() + meeting.options.init_timeout
    state = MembershipState(limits)
    entries = SignedStore(meeting.store, meeting.secret, deadline)
    with store_errors():
        log = MembershipLog(entries)
        first_free = 1 if hosted_by_rank_0(meeting.init_method) else 0
        record = claim(log, state, record, deadline, first_free)
    meeting.network.connect_itself(record.member_id)
    if record.endpoint:
        announce_endpoint(record.info, record.endpoint, bool(record.public_key))
    membership = Membership([record], record.member_id)
    elastic = not record.world_size
    agent = Agent(meeting.network, membership, meeting.options, meeting.store, elastic)
    try:
        check_device_maps(state.members.values(), complete=False)
        agent.serve([*services, lambda agent: ElasticMembership(agent, log, state)])
        service = agent.service(ElasticMembership)
        entries.deadline = None  # the follower may wait
        service.follower.start()
        service.follower.admission.wait(deadline, meeting.options.init_timeout)
    except BaseException:
        agent.close()
        entries.deadline = time.monotonic()
        with contextlib.suppress(RuntimeError, OSError):
            log.append(MembershipEvent(Verb.GONE, record.token, why=Reason.ENDED))
        raise
    return agent


def claim(
    log: MembershipLog,
    state: MembershipState,
    record: PeerRecord,
    deadline: float,
    first_free: int = 0,
) -> PeerRecord:
    """Asks for a name and a rank until they are given; returns the record with its incarnation.

    Args:
        log: of the mesh; nothing is read yet.
        state: empty; afterwards it knows the members.
        record: this worker's; a rank below 0 stands for any free one.
        deadline: on the clock of ``time.monotonic``.
        first_free: the first rank that is given to a worker that takes any. Rank 0 is not, if it
            hosts the store: others may find the store before rank 0 has its rank.

    Raises:
        RendezvousError: a living member has that name or that rank; the sizes differ.
    """
    any_rank = record.rank < 0
    death_reported_at = min(deadline, time.monotonic() + state.limits.death_report_seconds)
    while True:
        log.catch_up(state)
        log.compact(state, len(state.members))
        taken = {member.rank for member in state.members.values()}
        while any_rank and (record.rank < first_free or record.rank in taken):
            record = replace(record, rank=log.next_rank())
        if (mismatch := state.mismatch(record)) is not None:
            raise RendezvousError(mismatch)
        obstacle = state.obstacle(record)
        if obstacle is None:
            log.append(MembershipEvent(Verb.JOIN, record.token, record))
            log.catch_up(state)
            member = state.member_of(record.token)
            if member in state.members:
                return state.members[member]
            obstacle = state.obstacle(record)
            if obstacle is None:
                raise RendezvousError(
                    state.refusal(record.token)
                    or f"worker {record.name} was suspended while it asked to join the mesh, which "
                    "has gone on without it: start it again"
                )
        if any_rank and obstacle.name != record.name:
            continue  # another worker has chosen that rank meanwhile
        _wait_for_end(log, obstacle, record, death_reported_at, state.limits)


def _wait_for_end(
    log: MembershipLog, other: PeerRecord, record: PeerRecord, until: float, limits: ElasticLimits
) -> None:
    """Waits a moment if the member that has a name or a rank may have died.

    Raises:
        RendezvousError: it is alive, or nobody knows.
    """
    alive = _is_alive(other, record, limits)
    if alive is False:
        log.append(MembershipEvent(Verb.GONE, other.token, why=Reason.ENDED))
    elif alive or time.monotonic() > until:
        what = f"rank {record.rank}" if other.rank == record.rank else f"worker name {record.name}"
        raise RendezvousError(
            f"{what} is not unique: worker {other.name} (rank {other.rank}) of this mesh has it, "
            f"and worker {record.name} (rank {record.rank}) asks for it: give it another one, or "
            "wait until that worker is gone"
        )
    else:
        # Others may report it, and the store has no event for that.
        time.sleep(limits.pause_seconds[1])


def _is_alive(other: PeerRecord, record: PeerRecord, limits: ElasticLimits) -> bool | None:
    """Whether another worker is alive; None if that can't be seen from here."""
    if record.shares_host(other):
        return is_alive(Path(other.directory))
    if not other.endpoint:
        return None
    if record.endpoint == other.endpoint:  # this worker listens there now, which it would find
        near = record.network_key == other.network_key or not is_loopback(other.endpoint)
        return False if near else None
    with contextlib.closing(ListenerProbe(other.endpoint)) as probe:
        deadline = time.monotonic() + limits.refused_seconds
        while probe.listening() is None and probe.pending and time.monotonic() < deadline:
            time.sleep(limits.pause_seconds[0])
        return probe.listening()
