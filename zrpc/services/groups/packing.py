"""Packs what goes to all members of a group once, and makes each member's message of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.function_names import name_of
from zrpc.calls.unmapped import name_argument
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime import garbage_collector
from zrpc.services.groups.arguments import PerMember, Share
from zrpc.services.groups.service import GroupService, Part
from zrpc.wire.devices import DeviceMap, UnmappedDevice
from zrpc.wire.envelope import Envelope
from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.parts import PartEncoder
from zrpc.wire.pickling import register_reducer
from zrpc.wire.unpickling import decoder, unpack_part

# The places of the parts of a call.
_FUNCTION, _ARGS, _KWARGS = range(3)


class _Carried(Envelope):
    """A part in the message to one member, which arrives as the object.

    Args:
        part: the part.
        fills: the values of its holes.
    """

    __slots__ = ("fills", "part")

    def __init__(self, part: Part, fills: Sequence[Any]) -> None:
        self.part = part
        self.fills = fills

    @property
    @override
    def contents(self) -> Sequence[Any]:
        return self.fills


class _Element(Envelope):
    """The function, the args or the kwargs of a call, which is pickled once for all three.

    Args:
        call: the call.
        place: which of them.
        qualname: what the function is called, for messages to people.
    """

    __slots__ = ("__qualname__", "call", "place")

    def __init__(self, call: _Carried, place: int, qualname: str = "") -> None:
        self.call = call
        self.place = place
        self.__qualname__ = qualname

    @property
    @override
    def contents(self) -> Sequence[Any]:
        return self.call.fills


def _unpack(blocks: Sequence[Any], fills: Sequence[Any]) -> Any:
    body, table, *buffers = blocks
    return unpack_part(Message(0, body=body, table=table, buffers=buffers), fills)


def _take(call: tuple[Any, Any, Any], place: int) -> Any:
    if place == _KWARGS:
        # All is unpickled. Only the tensors keep the shared memory from now on.
        for tag in (Tag.COMMON, Tag.RELAYED):
            (decoder().message.attachments or {}).pop(tag, None)
    return call[place]


register_reducer(_Carried, lambda carried: (_unpack, (carried.part, carried.fills)))
register_reducer(_Element, lambda element: (_take, (element.call, element.place)))


class _Form(NamedTuple):
    """What must be alike at members that get the same packing.

    Attributes:
        same_main: whether a name in ``__main__`` means the same there.
        devices: where tensors arrive there; None if there are no devices.
    """

    same_main: bool
    devices: DeviceMap | None = None


class Bodies:
    """The bodies of the requests to the members of a group: all parts are packed by then.

    A body is what that of a single call is, see `Caller.call_async`: the function or the name of
    the method, args and kwargs.

    Args:
        agent: makes the calls.
        members: who gets one.
        what: a function, or the name of a method.
        args: its arguments.
        kwargs: its keyword arguments.

    Attributes:
        name: what is called, for messages to people.
        shared: what `zrpc.share` was called with; None if it was not.

    Raises:
        ValueError: an argument has not as many values as there are members.
        SerializationError: an argument for all can't be pickled.
    """

    def __init__(
        self,
        agent: Agent,
        members: Sequence[WorkerInfo],
        what: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._service = agent.service(GroupService)
        own = agent.membership.own_record
        self._own_id = own.member_id
        # The members that hand parts on, by host; this worker at its own.
        self._firsts = {own.host_key: own.member_id} if own.reaches_by_ipc(own) else {}
        self._members = list(members)
        self._what = what
        self.name = name_of((what,))
        self._is_method = isinstance(what, str)
        self._values: dict[int, Sequence[Any]] = {}
        self._repeated: dict[tuple[int, _Form], Part] = {}
        self._parts: dict[_Form, Part] = {}
        self.shared: Share | None = None
        if garbage_collector.running:
            garbage_collector.check("call a group")
        content = None if self._is_method else what, args, kwargs
        self._in_graph = agent.codec.encoder(agent.membership.own_id).in_graph
        self._forms = [self._form_of(member.member_id) for member in members]
        for form in set(self._forms) or {_Form(True)}:
            self._parts[form] = self._pack(content, form, self._parts.items())
        holes = [hole for part in {*self._parts.values()} for hole in part.holes]
        self._find_shared(holes)
        for hole in holes:
            if isinstance(hole, PerMember) and id(hole) not in self._values:
                self._values[id(hole)] = hole.values(len(members))
                self._pack_repeated(hole)
        self._lay_in_memory()

    def _form_of(self, member: MemberId) -> _Form:
        membership = self._service.agent.membership
        maps = membership.device_maps.get(member)
        return _Form(membership.same_main[member], None if maps is None else maps[0])

    def _pack(self, obj: Any, form: _Form, packed: Iterable[tuple[_Form, Part]]) -> Part:
        """Packs an object, unless it was ``packed`` in the same way."""
        moves_cpu = form.devices is not None and form.devices.moves_cpu
        for other, part in packed:
            if other.same_main == form.same_main and not (part.placed or moves_cpu):
                return part
        agent = self._service.agent
        encoder = partial(PartEncoder, agent, form.same_main, self._in_graph, form.devices)
        packer = encoder()
        try:
            message = packer.part(obj)
        except UnmappedDevice as error:
            name_argument(error, (self.name, *obj[1:]) if isinstance(obj, tuple) else obj, encoder)
            raise
        blocks = [message.body, message.table, *message.buffers]
        return Part(self._service, blocks, packer.holes, packer.tensors.placed)

    def _find_shared(self, holes: Sequence[Any]) -> None:
        found = {id(hole): hole for hole in holes if isinstance(hole, Share)}
        if len(found) > 1 or (found and any(isinstance(hole, PerMember) for hole in holes)):
            raise ValueError(
                "expected one share() in a call, and neither split() nor each() beside it, found "
                "several of these: an item goes to whichever member is free"
            )
        self.shared = next(iter(found.values()), None)
        if self.shared is not None and not self._members:
            raise ValueError("expected members to share() items among, found an empty group")

    def _pack_repeated(self, hole: PerMember) -> None:
        """Packs the values that several members get once."""
        repeated = hole.repeated()
        for value, form in zip(self._values[id(hole)], self._forms, strict=True):
            key = id(value), form
            if id(value) in repeated and key not in self._repeated:
                same = [(f, part) for (each, f), part in self._repeated.items() if each == key[0]]
                self._repeated[key] = self._pack(value, form, same)

    def _lay_in_memory(self) -> None:
        """Copies each part to shared memory, if it is for several messages to one host.

        On another host, the first member that lives hands it on.
        """
        for part in {*self._parts.values(), *self._repeated.values()}:
            self._service.count(bytes_packed=part.nbytes)
        readers = defaultdict[tuple[Part, MemberId], list[MemberId]](list)
        for place, member in enumerate(self._members):
            if member.member_id != self._own_id:
                first = self._first_on_host(member)
                for part in (self._part(place), *self._parts_in(place)):
                    readers[part, first].append(member.member_id)
        for (part, first), members in readers.items():
            if (len(members) == 1 and self.shared is None) or not part.lay():
                continue
            if first == self._own_id:
                self._service.count(bytes_sent=part.nbytes)
            else:
                for each in members:
                    part.hand_on(each, first)

    def _first_on_host(self, member: WorkerInfo) -> MemberId:
        """Returns the member that hands parts on at a member's host; this worker for its own."""
        membership = self._service.agent.membership
        id = member.member_id
        record = membership.records[id]
        if id in membership.lost or not record.reaches_by_ipc(record):
            return id
        return self._firsts.setdefault(record.host_key, id)

    def add(self, member: WorkerInfo) -> int | None:
        """Adds a member that has joined; returns its place, or None if nothing is packed for it."""
        form = self._form_of(member.member_id)
        if form not in self._parts:
            return None
        self._members.append(member)
        self._forms.append(form)
        first = self._first_on_host(member)
        if first != self._own_id:
            self._parts[form].hand_on(member.member_id, first)
        return len(self._members) - 1

    @property
    def nbytes(self) -> int:
        """The size of what each message must have itself, at most, without its own values."""
        members = enumerate(each.member_id for each in self._members)
        inline = (self._part(place) for place, m in members if not self._part(place).is_beside(m))
        return max((part.nbytes for part in inline), default=0)

    def _part(self, place: int) -> Part:
        return self._parts[self._forms[place]]

    def _parts_in(self, place: int) -> list[Part]:
        """Returns the parts that fill holes of the message to a member."""
        fills = self._fills(place, None)
        return [each.part for each in fills if isinstance(each, _Carried)]

    def _fills(self, place: int, item: Any) -> list[Any]:
        """Returns what fills the holes of the message to a member.

        Args:
            place: the member's.
            item: the one that it gets of `shared`.
        """
        fills = []
        for hole in self._part(place).holes:
            value = hole
            if isinstance(hole, Share):
                value = item
            elif isinstance(hole, PerMember):
                value = self._values[id(hole)][place]
                repeated = self._repeated.get((id(value), self._forms[place]))
                if repeated is not None:
                    value = _Carried(repeated, repeated.holes)
            fills.append(value)
        return fills

    def body(self, place: int, item: Any = None) -> tuple[Any, Any, Any]:
        """Returns the body of the request to a member; see `_fills`."""
        call = _Carried(self._part(place), self._fills(place, item))
        what = self._what if self._is_method else _Element(call, _FUNCTION, self.name)
        return what, _Element(call, _ARGS), _Element(call, _KWARGS)
