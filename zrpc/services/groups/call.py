"""One call of all members of a group: whom it goes to, with what, and until when.

What goes to all members is packed once, and each member's message is made of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.calls.function_names import name_of
from zrpc.calls.future_error import without_frames
from zrpc.calls.pending_calls import OVERHEAD_BYTES
from zrpc.calls.unmapped import name_argument
from zrpc.constants import Seconds
from zrpc.errors import RpcTimeoutError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime import garbage_collector
from zrpc.runtime.interrupts import raise_if_of_handler
from zrpc.services.groups.arguments import PerMember, Share
from zrpc.services.groups.service import GroupService, Part
from zrpc.wire.devices import DeviceMap, UnmappedDevice
from zrpc.wire.kind import Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.parts import PartEncoder
from zrpc.wire.pickling import Envelope, register_reducer
from zrpc.wire.unpickling import decoder, unpack_part

# A call that is made within this time has the timeout of the whole: an error then says where that
# comes from.
_AT_ONCE_SECONDS = 0.001
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


class Target(NamedTuple):
    """A member, as a call sees it.

    Attributes:
        info: the worker that is called.
        ask: sends a request: a body, and a timeout.
    """

    info: WorkerInfo
    ask: Callable[..., Any]


# Makes a target of a worker that joins; None if it does not belong to the group.
Joining = Callable[[WorkerInfo], Target | None]


class GroupCall:
    """A call that is about to be made: all is packed by then, and its time begins.

    Args:
        agent: makes it.
        targets: the members.
        body: a function or the name of a method, args and kwargs.
        timeout: of the whole, in seconds; 0 for no limit, -1 for the default. If its deadline has
            passed, the members' calls fail.
        joining: which workers that join meanwhile are called for items of `zrpc.share`.

    Attributes:
        agent, joining: the same.
        name: what is called, for messages to people.
        names: of the members, by place.
        targets: the members by place, first those that are called first.
        shared: what `zrpc.share` was called with; None if it was not.

    Raises:
        ValueError: an argument has not as many values as there are members.
        SerializationError: an argument for all can't be pickled.
    """

    def __init__(
        self,
        agent: Agent,
        targets: Sequence[Target],
        body: tuple[Any, Any, Any],
        timeout: Seconds,
        joining: Joining | None = None,
    ) -> None:
        self.agent = agent
        self.joining = joining
        self._service = agent.service(GroupService)
        own = agent.membership.own_record
        self._own_id = own.member_id
        # The members that hand parts on, by host; this worker at its own.
        self._firsts = {own.host_key: own.member_id} if own.reaches_by_ipc(own) else {}
        self._what, *arguments = body
        self.name = name_of(body)
        self.names = [each.info.name for each in targets]
        self._members = [each.info.member_id for each in targets]
        self._forms = [self._form_of(member) for member in self._members]
        self._values: dict[int, Sequence[Any]] = {}
        # By the identities of the call itself, and of values that several members get.
        self._packings = defaultdict[int, dict[_Form, Part]](dict)
        if garbage_collector.running:
            garbage_collector.check("call a group")
        self._in_graph = agent.codec.encoder(own.member_id).in_graph
        content = None if isinstance(self._what, str) else self._what, *arguments
        self._key = id(content)
        parts = {self._pack(content, form) for form in self._forms or [_Form(True)]}
        holes = [hole for part in parts for hole in part.holes]
        self.shared = self._find_shared(holes)
        for hole in holes:
            if isinstance(hole, PerMember) and id(hole) not in self._values:
                self._pack_values(hole)
        self._lay_in_memory()
        self.targets = {place: targets[place] for place in self._in_order_of_room()}
        self._timeout = timeout
        self._seconds = max(0.0, agent.caller.time_limit(timeout))
        self._begun = monotonic()

    def _form_of(self, member: MemberId) -> _Form:
        membership = self.agent.membership
        maps = membership.device_maps.get(member)
        return _Form(membership.same_main[member], None if maps is None else maps[0])

    def _pack(self, obj: Any, form: _Form) -> Part:
        """Packs an object, unless it was packed in the same way."""
        packings = self._packings[id(obj)]
        moves_cpu = form.devices is not None and form.devices.moves_cpu
        for other, part in packings.items():
            alike = other.same_main == form.same_main and not (part.placed or moves_cpu)
            if alike or other == form:
                packings[form] = part
                return part
        encoder = partial(PartEncoder, self.agent, form.same_main, self._in_graph, form.devices)
        packer = encoder()
        try:
            message = packer.part(obj)
        except UnmappedDevice as error:
            name_argument(error, (self.name, *obj[1:]) if isinstance(obj, tuple) else obj, encoder)
            raise
        blocks = [message.body, message.table, *message.buffers]
        packings[form] = Part(self._service, blocks, packer.holes, packer.tensors.placed)
        return packings[form]

    def _find_shared(self, holes: Sequence[Any]) -> Share | None:
        found = {id(hole): hole for hole in holes if isinstance(hole, Share)}
        if len(found) > 1 or (found and any(isinstance(hole, PerMember) for hole in holes)):
            raise ValueError(
                "expected one share() in a call, and neither split() nor each() beside it, found "
                "several of these: an item goes to whichever member is free"
            )
        if found and not self._members:
            raise ValueError("expected members to share() items among, found an empty group")
        return next(iter(found.values()), None)

    def _pack_values(self, hole: PerMember) -> None:
        """Packs the values of an argument that several members get."""
        values, repeated = hole.values(len(self._members)), hole.repeated()
        self._values[id(hole)] = values
        for value, form in zip(values, self._forms, strict=True):
            if id(value) in repeated:
                self._pack(value, form)

    def _lay_in_memory(self) -> None:
        """Copies each part to shared memory, if it is for several messages to one host.

        On another host, the first member that lives hands it on.
        """
        for part in {part for each in self._packings.values() for part in each.values()}:
            self._service.count(bytes_packed=part.nbytes)
        readers = defaultdict[tuple[Part, MemberId], list[MemberId]](list)
        for place, member in enumerate(self._members):
            if member != self._own_id:
                first = self._first_on_host(member)
                fills = [each for each in self._fills(place, None) if isinstance(each, _Carried)]
                for part in (self._part(place), *(each.part for each in fills)):
                    readers[part, first].append(member)
        for (part, first), members in readers.items():
            if (len(members) == 1 and self.shared is None) or not part.lay():
                continue
            if first == self._own_id:
                self._service.count(bytes_sent=part.nbytes)
            else:
                for each in members:
                    part.hand_on(each, first)

    def _first_on_host(self, member: MemberId) -> MemberId:
        """Returns the member that hands parts on at a member's host; this worker for its own."""
        membership = self.agent.membership
        record = membership.records[member]
        if member in membership.lost or not record.reaches_by_ipc(record):
            return member
        return self._firsts.setdefault(record.host_key, member)

    def add(self, member: MemberId) -> int | None:
        """Adds a member that has joined; returns its place, or None if nothing is packed for it."""
        form = self._form_of(member)
        if form not in self._packings[self._key]:
            return None
        self._members.append(member)
        self._forms.append(form)
        first = self._first_on_host(member)
        if first != self._own_id:
            self._part(-1).hand_on(member, first)
        return len(self._members) - 1

    def _in_order_of_room(self) -> list[int]:
        """Returns the places of the members: last those whose calls may have to wait for room.

        Otherwise one member that is slow, or stands still, would use up the time of all others.
        """
        parts = [(self._part(place), member) for place, member in enumerate(self._members)]
        # Of what each message must have itself, at most, without its own values.
        nbytes = max((p.nbytes for p, member in parts if not p.is_beside(member)), default=0)
        calls = self.agent.caller.calls
        loads = calls.loads() if calls.limit else {}

        def may_wait(place: int) -> bool:
            return any(
                load.waiting or load.used + nbytes + OVERHEAD_BYTES > calls.limit
                for load in loads.get(self._members[place], ())
            )

        return sorted(range(len(parts)), key=may_wait)

    def _part(self, place: int) -> Part:
        return self._packings[self._key][self._forms[place]]

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
                part = self._packings.get(id(value), {}).get(self._forms[place])
                value = value if part is None else _Carried(part, part.holes)
            fills.append(value)
        return fills

    def body(self, place: int, item: Any = None) -> tuple[Any, Any, Any]:
        """Returns the body of the request to a member; see `_fills`."""
        call = _Carried(self._part(place), self._fills(place, item))
        what = self._what if isinstance(self._what, str) else _Element(call, _FUNCTION, self.name)
        return what, _Element(call, _ARGS), _Element(call, _KWARGS)

    def ask_all(self) -> Iterator[tuple[int, Any, Exception | None]]:
        """Asks each member; yields its place, what that has returned, and the error if it failed.

        The others are asked nevertheless.
        """
        for place, target in self.targets.items():
            asked, failure = None, None
            try:
                asked = target.ask(self.body(place), self.time_left())
            except Exception as error:
                raise_if_of_handler(error)
                failure = without_frames(error)  # they refer to what goes to the other members
            yield place, asked, failure

    def time_left(self) -> Seconds:
        """Returns the timeout of a request that is sent now.

        Raises:
            RpcTimeoutError: no time is left.
        """
        passed = monotonic() - self._begun
        if not self._seconds or passed < _AT_ONCE_SECONDS:
            return self._timeout
        if passed < self._seconds:
            return self._seconds - passed
        error = RpcTimeoutError(
            f"the call was not sent within the timeout of the group ({self._seconds:g} s): the "
            "calls of its other members took that long to be sent, or this worker was busy"
        )
        error.executed = False
        raise error
