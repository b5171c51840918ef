"""The members of a mesh: names, ranks, and which of them are gone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

from zrpc import stand_in
from zrpc.errors import RpcError
from zrpc.membership.device_maps import maps_between
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.worker_info import WorkerInfo
from zrpc.transport.identity import bulk_identity, heartbeat_identity, identity_of
from zrpc.wire.devices import DeviceMap
from zrpc.wire.member_id import MemberId, incarnation_of, rank_of

_NAMED_IN_ERROR = 8


class Membership:
    """The workers of one mesh, as one of them sees them, by their member ids.

    A worker that joins a running mesh is *introduced* first: its messages are recognized as its
    own. It can be found only once it is *admitted*, when it is introduced everywhere. So a worker
    that learns of it by a reference that another worker passes on can reach it.

    Args:
        records: of all workers that are members now.
        own_id: this worker's member id.

    The look-ups may be called from any thread, the methods that change something from one.
    """

    def __init__(self, records: Iterable[PeerRecord], own_id: MemberId) -> None:
        # Of all workers that were ever introduced.
        self.records = {record.member_id: record for record in records}
        self.infos: dict[MemberId, WorkerInfo] = {}
        self.own_id = own_id
        self.awaited: set[MemberId] = set()  # introduced and not admitted
        self.lost: set[MemberId] = set()
        # How many members each rank has had. Some of them may be gone without ever having been
        # announced to this worker.
        self.starts: Mapping[int, int] = {}
        self._found: set[MemberId] = set()  # could be found at some time
        self._by_name: dict[str, WorkerInfo] = {}
        self._by_rank: dict[int, WorkerInfo] = {}
        # Whether objects of ``__main__`` are sent to that worker by name: it means the same there.
        self.same_main: dict[MemberId, bool] = {}
        # Where tensors of requests to that worker arrive, and those of answers to it.
        self.device_maps: dict[MemberId, tuple[DeviceMap, DeviceMap]] = {}
        # By routing id: current members, and all workers that were ever introduced.
        self._members: dict[bytes, MemberId] = {}
        self._introduced: dict[bytes, MemberId] = {}
        # Returns the member with this routing id, or None if the sender isn't a current member.
        # Without the cost of another call, as it is asked for each message.
        self.member_of: Callable[[bytes], MemberId | None] = self._members.get
        # Returns the worker with this routing id, which may be lost, or introduced and not
        # admitted.
        self.introduced_as: Callable[[bytes], MemberId | None] = self._introduced.get
        self._watchers: dict[bytes, MemberId] = {}  # by the identity of their heartbeats
        for record in list(self.records.values()):
            self.introduce(record)
            self.admit(record.member_id)

    @property
    def info(self) -> WorkerInfo:
        """This worker."""
        return self.infos[self.own_id]

    @property
    def own_record(self) -> PeerRecord:
        """This worker's own record."""
        return self.records[self.own_id]

    @property
    def living(self) -> list[MemberId]:
        """All workers that can be found and are not gone."""
        return sorted(self._found - self.lost)

    def introduce(self, record: PeerRecord) -> None:
        """Adds a worker that is about to join."""
        member = record.member_id
        # torch sends all of them by name; then the receiver asks for what its script lacks.
        by_name = stand_in.is_active() or record.same_main(self.records[self.own_id])
        self.same_main[member] = by_name
        if (maps := maps_between(self.records[self.own_id], record)) is not None:
            self.device_maps[member] = maps
        self.records[member] = record
        self.awaited.add(member)
        self._watchers[heartbeat_identity(record.identity)] = member
        self._introduced |= dict.fromkeys(_identities(record), member)
        self.infos[member] = record.info

    def admit(self, member: MemberId) -> bool:
        """Makes a worker that has joined findable; returns False if it was already, or is gone."""
        if member not in self.awaited:
            return False
        info = self.infos[member]
        self._members |= dict.fromkeys(_identities(self.records[member]), member)
        self.awaited.discard(member)
        self._found.add(member)
        self._by_rank[info.id] = info
        self._by_name[info.name] = info
        return True

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Returns the worker that ``to`` names.

        Raises:
            RpcError: there is none.
            ValueError: ``to`` isn't a name, rank or WorkerInfo.
        """
        if isinstance(to, str):
            if to in self._by_name:
                return self._by_name[to]
        elif isinstance(to, WorkerInfo):
            found = self._by_rank.get(to.id)
            if found == to:
                return found
        elif isinstance(to, int) and not isinstance(to, bool):
            if to in self._by_rank:
                return self._by_rank[to]
        else:
            raise ValueError(
                f"Cannot get WorkerInfo from name {to}: expected a name, a rank or a WorkerInfo, "
                f"got one of type {type(to).__name__}"
            )
        raise RpcError(f"could not find destination {to!r}: {self._advice(to)}")

    def successor(self, gone: WorkerInfo) -> WorkerInfo | None:
        """Returns the living worker that has the name of one that is gone, if there is one."""
        found = self._by_name.get(gone.name)
        return None if found is None or found.member_id in self.lost else found

    def is_gone(self, member: MemberId) -> bool:
        """Returns whether a member is lost, or was gone before this worker came."""
        return member in self.lost or member not in self.infos

    def _advice(self, to: object) -> str:
        """Returns which workers there are, and what may be wrong with an unknown one."""
        infos = list(self._by_rank.values())
        names = ", ".join(info.name for info in infos[:_NAMED_IN_ERROR])
        left = len(infos) - _NAMED_IN_ERROR
        text = f"the workers are {names}{f' and {left} more' if left > 0 else ''}"
        world_size = self.records[self.own_id].world_size
        missing = (world_size or 0) - len(self._by_rank)
        if missing > 0:
            found = "1 other is" if missing == 1 else f"{missing} others are"
            return f"{text}; {found} gone, and not started again so far: call it when it is back"
        similar = difflib.get_close_matches(str(to), list(self._by_name), 1)
        if similar and isinstance(to, str):
            return f"{text}; did you mean {similar[0]!r}?"
        if world_size == 1:
            return (
                f"{text} alone: start more by `zrpc launch -n 2 SCRIPT`, with options before the "
                "script"
            )
        if not world_size:
            return f"{text}; others may still join, since no world size was set"
        return text

    def watcher_of(self, routing_id: bytes) -> MemberId | None:
        """Returns the worker, lost or not, whose heartbeats have this routing id."""
        return self._watchers.get(identity_of(routing_id))

    def mark_lost(self, member: MemberId) -> None:
        """Marks a worker as gone, forever: even if it is heard again, it is no longer a member."""
        for identity in _identities(self.records[member]):
            self._members.pop(identity, None)
        self.lost.add(member)
        self.awaited.discard(member)

    def departed_record(self, member: MemberId) -> PeerRecord | None:
        """Returns a stand-in for the record of a worker that was gone before this one joined.

        Others may still refer to that worker. Returns None if there was no such worker.
        """
        rank, incarnation = rank_of(member), incarnation_of(member)
        if member in self.records or not 0 <= incarnation < self.starts.get(rank, 0):
            return None
        token = f"{member:032x}"  # no worker draws it
        return PeerRecord("departed", rank, 0, token, "", "", "", incarnation=incarnation)

    def was_found(self, member: MemberId) -> bool:
        """Whether a worker is or was findable, and not just introduced."""
        return member in self._found

    def shares_host(self, member: MemberId) -> bool:
        """Whether this worker can see that one's private directory."""
        return self.records[self.own_id].shares_host(self.records[member])

    def reaches_by_ipc(self, member: MemberId) -> bool:
        """Whether the two talk by Unix sockets."""
        return self.records[self.own_id].reaches_by_ipc(self.records[member])


def _identities(record: PeerRecord) -> tuple[bytes, bytes]:
    """Returns the routing ids of a worker's mailboxes."""
    return record.identity, bulk_identity(record.identity)
