"""A network that reorders and repeats messages, and loses workers, for the reference count."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

from zrpc.services.rref.messages import NO_FORK, Fork, GloballyUniqueId, ReferenceMessage
from zrpc.services.rref.protocol import References


@dataclass(frozen=True)
class Handle:
    """A handle on a worker; ``fork_id`` is None at the owner."""

    worker: int
    rref_id: GloballyUniqueId
    fork_id: GloballyUniqueId | None
    owner: int


@dataclass(frozen=True)
class Packet:
    """Something under way.

    Of ``create`` (a call of ``remote``), ``created`` (its answer) and ``fork`` (any message
    with a fork in it) each copy is read once; a ``message`` of the protocol may be repeated.
    """

    kind: str
    sender: int
    to: int
    content: object
    number: int = field(compare=False)


class Violation(AssertionError):
    """The protocol has broken one of its promises."""


class Network:
    """Some workers, what is under way between them, and who holds what."""

    def __init__(self, size: int) -> None:
        self.machines = [References(rank) for rank in range(size)]
        self.under_way: list[Packet] = []
        self.handles: list[Handle] = []
        self.dead: set[int] = set()
        # Pairs that the network separates while both live, and still talk to others.
        self.parted: set[frozenset[int]] = set()
        self.unaware: set[tuple[int, int]] = set()  # (living worker, one that it will lose)
        self.noticed: set[tuple[int, int]] = set()  # and has lost
        self.out: set[int] = set()
        self.owners: dict[GloballyUniqueId, int] = {}
        self.freed: Counter[GloballyUniqueId] = Counter()
        # Which workers have made or handed on, and which ever had, each value.
        self.givers: dict[GloballyUniqueId, set[int]] = {}
        self.known_to: dict[GloballyUniqueId, set[int]] = {}
        # The number of the last packet read of each (sender, receiver).
        self.read_up_to: Counter[tuple[int, int]] = Counter()
        self._made_ids: Counter[int] = Counter()  # by each worker
        self._sent = 0
        self.broken = False  # whether messages were lost since all have talked to all
        self.clock = 0.0

    # what programs do

    def create(self, worker: int, owner: int) -> None:
        rref_id = self._new_id(worker)
        self.owners[rref_id] = owner
        self.givers[rref_id] = {worker}
        self.known_to[rref_id] = {worker, owner}
        machine = self.machines[worker]
        if worker == owner:
            machine.retain(rref_id)
            self.handles.append(Handle(worker, rref_id, None, owner))
        else:
            fork_id = self._new_id(worker)
            machine.create(rref_id, fork_id, owner)
            self.handles.append(Handle(worker, rref_id, fork_id, owner))
            self._send("create", worker, owner, (rref_id, fork_id))
        self._pump(worker)

    def hand_on(self, handle: Handle, to: int, cancelled: bool = False) -> None:
        worker, rref_id = handle.worker, handle.rref_id
        fork = Fork(rref_id, self._new_id(worker), handle.owner, handle.fork_id or NO_FORK)
        self.machines[worker].fork(fork, to)
        if cancelled:
            self.machines[worker].cancel_fork(fork)
        else:
            self.givers[rref_id].add(worker)
            self.known_to[rref_id].add(to)
            self._send("fork", worker, to, fork)
        self._pump(worker)

    def drop(self, handle: Handle) -> None:
        self.handles.remove(handle)
        machine = self.machines[handle.worker]
        if handle.fork_id is None:
            machine.release(handle.rref_id)
        else:
            machine.drop(handle.fork_id)
        self._pump(handle.worker)

    # what the network does

    def deliver(self, packet: Packet) -> None:
        self.under_way.remove(packet)
        self._read(packet)

    def repeat(self, packet: Packet) -> None:
        """Delivers a copy; the packet itself stays under way."""
        if packet.kind == "message":
            self._read(packet)

    def _read(self, packet: Packet) -> None:
        if packet.kind != "message" and (packet.to, packet.sender) in self.noticed:
            return  # no message of a member that is lost is read; those of the protocol it refuses
        machine, sender, content = self.machines[packet.to], packet.sender, packet.content
        pair = (sender, packet.to)
        self.read_up_to[pair] = max(self.read_up_to[pair], packet.number)
        if packet.kind == "message":
            machine.handle(sender, content)
        elif packet.kind == "create":
            machine.add(*content, sender)
            self._send("created", packet.to, sender, content[1])
        elif packet.kind == "created":
            machine.on_listed(content)
        else:
            machine.receive(content, sender)
            at_owner = content.owner == packet.to
            fork_id = None if at_owner else content.fork_id
            self.handles.append(Handle(packet.to, content.rref_id, fork_id, content.owner))
        self._pump(packet.to)

    def kill(self, worker: int) -> None:
        """What it has sent may still arrive; the others notice one by one."""
        self.dead.add(worker)
        self.handles = [handle for handle in self.handles if handle.worker != worker]
        self.under_way = [packet for packet in self.under_way if packet.to != worker]
        self.unaware = {pair for pair in self.unaware if pair[0] != worker}
        self.unaware |= {(other, worker) for other in self.living} - self.noticed

    def part(self, one: int, other: int) -> None:
        """Nothing arrives between two workers any more; they notice one after the other."""
        pair = frozenset((one, other))
        if len(pair) == 2 and pair not in self.parted:
            self.parted.add(pair)
            self.under_way = [p for p in self.under_way if {p.sender, p.to} != pair]
            self.unaware |= {(one, other), (other, one)}

    def agree(self, one: int, other: int) -> None:
        """Others decide which of two that are parted goes; all notice that, one by one.

        Until then they go on with it, and messages in flight may still arrive.
        """
        out = max(one, other)
        self.out.add(out)
        for rank in set(self.living) - {out}:
            self.unaware |= {(rank, out), (out, rank)} - self.noticed

    def undecided(self) -> list[list[int]]:
        """The parted that live, though neither of them is out."""
        return sorted(sorted(pair) for pair in self.parted if not pair & (self.out | self.dead))

    def lose_packet(self, packet: Packet) -> None:
        """Only what the dead have sent can get lost, and then all that they sent later."""
        pair = (packet.sender, packet.to)
        if packet.sender in self.dead and packet.number > self.read_up_to[pair]:
            self.under_way = [
                other
                for other in self.under_way
                if (other.sender, other.to) != pair or other.number < packet.number
            ]

    def break_off(self, packet: Packet) -> None:
        """Loses a message of the protocol, or one with a fork, with its connection."""
        if packet.kind == "message" or (packet.kind == "fork" and packet.sender != packet.to):
            self.under_way.remove(packet)
            self.broken = True

    def miss(self, worker: int, other: int) -> None:
        """A worker finds out, perhaps wrongly, that messages of another one are lost."""
        if worker != other:
            self.machines[worker].on_messages_lost(other)
            self._pump(worker)

    def answer(self, worker: int, other: int) -> None:
        """A worker answers another one's question: behind all that it sent before."""
        if not any((p.sender, p.to) == (worker, other) for p in self.under_way):
            self.machines[other].on_answered(worker)
            self._pump(other)

    def _find_out(self) -> None:
        """What is lost shows by later messages and answers; so all ask all, and time passes."""
        self.broken = False
        for one, other in itertools.permutations(self.living, 2):
            self.create(one, other)
            self.drop(self.handles[-1])
            self.miss(one, other)
        for _ in range(8):
            for one, other in itertools.permutations(self.living, 2):
                self.answer(one, other)
            while self.under_way:
                self.deliver(self.under_way[0])
            self.clock += 60.0
            for rank in self.living:
                self.machines[rank].expire(self.clock)
                self._pump(rank)

    def notice(self, worker: int, dead: int) -> None:
        self.unaware.remove((worker, dead))
        self.noticed.add((worker, dead))
        self.machines[worker].on_member_lost(dead)
        self._pump(worker)

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(len(self.machines)) if rank not in self.dead]

    # what must hold

    def _pump(self, worker: int) -> None:
        """Takes what a worker's machine has to say, and checks what it frees."""
        machine = self.machines[worker]
        machine.look()
        outgoing, machine.outgoing = machine.outgoing, []
        for to, message in outgoing:
            # As bytes, so that nothing but what the message says gets through.
            (copy,) = ReferenceMessage.parse_all(message.pack())
            self._send("message", worker, to, copy)
        freed, machine.freed = machine.freed, []
        for rref_id in freed:
            self._check_freed(worker, rref_id)

    def _check_freed(self, worker: int, rref_id: GloballyUniqueId) -> None:
        self.freed[rref_id] += 1
        if worker != self.owners[rref_id]:
            raise Violation(f"{worker} has freed {rref_id}, which {self.owners[rref_id]} owns")
        # What the dead have handed on and nobody has read may be told too late.
        known = self.known_to[rref_id]
        parted = bool(known & self.out) or any(pair <= known for pair in self.parted)
        if self.givers[rref_id] & self.dead or parted:
            return
        lossy = bool(self.known_to[rref_id] & self.dead)
        asked_for = [
            packet
            for packet in self.under_way
            if packet.kind == "create" and packet.content[0] == rref_id
        ]
        if asked_for and lossy:
            return  # there is no value yet, only the word of somebody dead that there will be
        holders = [handle for handle in self.handles if handle.rref_id == rref_id]
        if holders:
            raise Violation(f"{rref_id} was freed while there were {holders}")
        forks = [
            packet
            for packet in self.under_way
            if packet.kind == "fork" and packet.content.rref_id == rref_id
        ]
        if forks or asked_for:
            raise Violation(f"{rref_id} was freed while {forks + asked_for} were under way")
        if self.freed[rref_id] > 1 and not lossy:
            raise Violation(f"{rref_id} was freed more than once")

    def finish(self, order: random.Random) -> None:
        """Drops all handles, delivers everything, and checks that nothing is left."""
        while self.handles or self.under_way or self.unaware or self.undecided() or self.broken:
            moves = [
                *((self.drop, (handle,)) for handle in self.handles),
                *((self.deliver, (packet,)) for packet in self.under_way),
                *((self.notice, pair) for pair in sorted(self.unaware)),
                *((self.agree, pair) for pair in self.undecided()),
            ] or [(self._find_out, ())]
            move, arguments = order.choice(moves)
            move(*arguments)
        for rank in self.living:
            machine = self.machines[rank]
            if not machine.idle:
                raise Violation(f"worker {rank} waits for a message that never comes")
            if sum(machine.sizes()):
                raise Violation(f"worker {rank} keeps values and forks: {machine.sizes()}")
        for rref_id, owner in self.owners.items():
            creator = rref_id.created_on
            # Its call may never have arrived.
            ends = frozenset((creator, owner))
            lost = creator in self.dead or ends & self.out or ends in self.parted
            if owner in self.living and not lost and not self.freed[rref_id]:
                raise Violation(f"{rref_id} was never freed")

    def _send(self, kind: str, sender: int, to: int, content: object) -> None:
        cut = (sender, to) in self.noticed or frozenset((sender, to)) in self.parted
        if to not in self.dead and not cut:
            self._sent += 1
            self.under_way.append(Packet(kind, sender, to, content, self._sent))

    def _new_id(self, worker: int) -> GloballyUniqueId:
        self._made_ids[worker] += 1
        return GloballyUniqueId(worker, self._made_ids[worker])


# A step is what happens, and numbers that choose among what it can happen to: drawn like
# this, a failing schedule shrinks to the few steps that matter.
ORDINARY = ("create", "hand on", "hand on", "cancel", "drop", "deliver", "deliver", "repeat")
WITH_LOSSES = (*ORDINARY, "kill", "notice", "lose packet")
WITH_BREAKS = (*ORDINARY, "break off", "miss", "answer")
WITH_PARTITIONS = (*ORDINARY, "part", "notice", "agree")
Step = tuple[str, int, int]


def schedules(steps: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    # A step is drawn as one number: three draws would take three times as long.
    step = st.integers(0, len(steps) * 144 - 1).map(
        lambda number: (steps[number // 144], number // 12 % 12, number % 12)
    )
    # The length is drawn first: hypothesis's own lists are mostly too short to matter.
    return st.integers(0, 60).flatmap(lambda size: st.lists(step, min_size=size, max_size=size))


def run(size: int, schedule: list[Step], seed: int) -> Network:
    """Runs a schedule and then everything to its end."""
    network = Network(size)
    for what, first, second in schedule:
        _step(network, what, first, second)
    network.finish(random.Random(seed))
    return network


def _step(network: Network, what: str, first: int, second: int) -> None:
    living = network.living
    worker, other = living[first % len(living)], living[second % len(living)]
    anybody = second % len(network.machines)  # also the dead, whose end is not known everywhere
    handle = network.handles[first % len(network.handles)] if network.handles else None
    packet = network.under_way[first % len(network.under_way)] if network.under_way else None
    unaware = sorted(network.unaware)
    if what == "create":
        network.create(worker, anybody)
    elif what in ("hand on", "cancel") and handle:
        network.hand_on(handle, anybody, cancelled=what == "cancel")
    elif what == "drop" and handle:
        network.drop(handle)
    elif what == "deliver" and packet:
        network.deliver(packet)
    elif what == "repeat" and packet:
        network.repeat(packet)
    elif what == "break off" and packet:
        network.break_off(packet)
    elif what == "miss":
        network.miss(worker, other)
    elif what == "answer":
        network.answer(worker, other)
    elif what == "lose packet" and packet:
        network.lose_packet(packet)
    elif what == "kill" and len(living) > 2:
        network.kill(other)
    elif what == "part":
        network.part(worker, other)
    elif what == "agree" and network.undecided():
        network.agree(*network.undecided()[first % len(network.undecided())])
    elif what == "notice" and unaware:
        network.notice(*unaware[first % len(unaware)])
