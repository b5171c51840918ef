"""What several members of a group get, packed once."""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

from zrpc.services.groups.service import GroupService
from zrpc.services.groups.ticket import TICKET
from zrpc.services.shm import holds
from zrpc.wire.devices import DeviceMap
from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.parts import PartEncoder
from zrpc.wire.pickling import encoder, register_reducer
from zrpc.wire.unpickling import decoder


class Part:
    """An object that is packed once for several members. It arrives as its blocks.

    Args:
        service: this worker's.
        blocks: its pickle, its table and its buffers.
        holes: what is left out.

    Attributes:
        blocks, holes: the same.
        nbytes: the size of all blocks.
        placed: whether a device map says where its tensors arrive.
        relays: the members of other hosts that ask another worker there for the blocks, and which.
    """

    def __init__(
        self, service: GroupService, blocks: Sequence[Any], holes: Sequence[Any] = ()
    ) -> None:
        self.blocks = blocks
        self.holes = holes
        self.nbytes = sum(memoryview(block).nbytes for block in blocks)
        self.placed = False
        self.relays: dict[MemberId, MemberId] = {}
        self._service = service
        self._share: holds.Share | None = None
        self._number = 0

    @classmethod
    def of(
        cls,
        service: GroupService,
        obj: Any,
        same_main: bool,
        in_graph: bool,
        devices: DeviceMap | None,
    ) -> Part:
        """Packs an object; see `PartEncoder`."""
        packer = PartEncoder(service.agent, same_main, in_graph, devices)
        packed = packer.part(obj)
        part = cls(service, [packed.body, packed.table, *packed.buffers], packer.holes)
        part.placed = packer.tensors.placed
        return part

    def lay(self) -> bool:
        """Copies the blocks to shared memory; returns False if they are small, or if it is full.

        From then on the part has nothing that its maker may change.
        """
        if self._share is None:
            self._share = self._service.shm.share(self.blocks)
            if self._share is not None:
                self.blocks = self._share.blocks()
        return self._share is not None

    def hand_on(self, member: MemberId, relay: MemberId) -> None:
        """Lets a member ask another one on its host for the blocks, if they are laid."""
        if self._share is not None:
            self._number = self._number or self._service.lend(self)
            self.relays[member] = relay

    def is_beside(self, member: MemberId) -> bool:
        """Returns whether the message to a member goes without the blocks, as far as is known."""
        membership = self._service.agent.membership
        near = member != membership.own_id and membership.reaches_by_ipc(member)
        return self._share is not None and (near or member in self.relays)

    def _reduce(self) -> tuple[Any, ...]:
        message = encoder()
        assert message is not None
        if self._share is not None:
            place = self._service.shm.name_share(message, self._share)
            if place is not None:
                return _find, (Tag.COMMON, place)
            relay = self.relays.get(message.destination)
            lost = self._service.agent.membership.lost
            # A relay that asks gets the blocks in the answer.
            if relay is not None and relay not in lost and message.request is None:
                message.holds = [*message.holds, self]
                tickets = message.extension(Tag.RELAYED)
                place = len(tickets) // TICKET.size
                tickets.extend(TICKET.pack(relay, self._number, self.nbytes))
                return _find, (Tag.RELAYED, place)
        self._service.count(bytes_sent=self.nbytes)
        return list, ([*map(PickleBuffer, self.blocks)],)


def _find(tag: int, place: int) -> Sequence[Any]:
    """Returns blocks that have come with a message, and not inside of it."""
    found: Sequence[Any] = decoder().message.attachment(tag)[place]
    return found


register_reducer(Part, Part._reduce)
