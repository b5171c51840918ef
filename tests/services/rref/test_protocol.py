"""The reference count against a network that reorders, repeats, and loses workers."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zrpc.errors import ProtocolError
from zrpc.services.rref import protocol
from zrpc.services.rref.messages import NO_FORK, Fork, GloballyUniqueId, ReferenceMessage, Verb
from zrpc.services.rref.protocol import References

# -- the simulation ------------------------------------------------------------------------


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

    def __init__(self, size: int, machine: type[References] = References) -> None:
        self.machines = [machine(rank) for rank in range(size)]
        self.under_way: list[Packet] = []
        self.handles: list[Handle] = []
        self.dead: set[int] = set()
        self.unaware: set[tuple[int, int]] = set()  # (living worker, dead worker)
        self.owners: dict[GloballyUniqueId, int] = {}
        self.freed: Counter[GloballyUniqueId] = Counter()
        # Which workers have made or handed on, and which ever had, each value.
        self.givers: dict[GloballyUniqueId, set[int]] = {}
        self.known_to: dict[GloballyUniqueId, set[int]] = {}
        # The number of the last packet read of each (sender, receiver).
        self.read_up_to: Counter[tuple[int, int]] = Counter()
        self._local_ids = [itertools.count() for _ in range(size)]
        self._numbers = itertools.count(1)

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
        worker, rref_id, fork_id, owner = (
            handle.worker,
            handle.rref_id,
            handle.fork_id,
            handle.owner,
        )
        fork = Fork(rref_id, self._new_id(worker), owner, fork_id or NO_FORK)
        self.machines[worker].fork(fork, fork_id, to)
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
        self.unaware |= {(other, worker) for other in self.living}

    def lose_packet(self, packet: Packet) -> None:
        """Only what the dead have sent can get lost, and then all that they sent later."""
        pair = (packet.sender, packet.to)
        if packet.sender in self.dead and packet.number > self.read_up_to[pair]:
            self.under_way = [
                other
                for other in self.under_way
                if (other.sender, other.to) != pair or other.number < packet.number
            ]

    def notice(self, worker: int, dead: int) -> None:
        self.unaware.remove((worker, dead))
        self.machines[worker].on_member_lost(dead)
        self._pump(worker)

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(len(self.machines)) if rank not in self.dead]

    # what must hold

    def _pump(self, worker: int) -> None:
        """Takes what a worker's machine has to say, and checks what it frees."""
        machine = self.machines[worker]
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
        if self.givers[rref_id] & self.dead:
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
        while self.handles or self.under_way or self.unaware:
            moves = [
                *((self.drop, (handle,)) for handle in self.handles),
                *((self.deliver, (packet,)) for packet in self.under_way),
                *((self.notice, pair) for pair in sorted(self.unaware)),
            ]
            move, arguments = order.choice(moves)
            move(*arguments)
        for rank in self.living:
            machine = self.machines[rank]
            if not machine.idle:
                raise Violation(f"worker {rank} waits for a message that never comes")
            if len(machine):
                raise Violation(f"worker {rank} keeps {machine._owned} {machine._held}")
        for rref_id, owner in self.owners.items():
            lost = rref_id.created_on in self.dead  # its call may never have arrived
            if owner in self.living and not lost and not self.freed[rref_id]:
                raise Violation(f"{rref_id} was never freed")

    def _send(self, kind: str, sender: int, to: int, content: object) -> None:
        if to not in self.dead:
            self.under_way.append(Packet(kind, sender, to, content, next(self._numbers)))

    def _new_id(self, worker: int) -> GloballyUniqueId:
        return GloballyUniqueId(worker, next(self._local_ids[worker]))


# A step is what happens, and numbers that choose among what it can happen to: drawn like
# this, a failing schedule shrinks to the few steps that matter.
ORDINARY = ("create", "hand on", "hand on", "cancel", "drop", "deliver", "deliver", "repeat")
WITH_LOSSES = (*ORDINARY, "kill", "notice", "lose packet")
Step = tuple[str, int, int]


def schedules(steps: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    number = st.integers(0, 11)
    step = st.tuples(st.sampled_from(steps), number, number)
    # The length is drawn first: hypothesis's own lists are mostly too short to matter.
    return st.integers(0, 60).flatmap(lambda size: st.lists(step, min_size=size, max_size=size))


def run(
    size: int, schedule: list[Step], seed: int, machine: type[References] = References
) -> Network:
    """Runs a schedule and then everything to its end."""
    network = Network(size, machine)
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
    elif what == "lose packet" and packet:
        network.lose_packet(packet)
    elif what == "kill" and len(living) > 2:
        network.kill(other)
    elif what == "notice" and unaware:
        network.notice(*unaware[first % len(unaware)])


thorough = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = st.integers(3, 5)
SEEDS = st.integers(0, 2**16)


# -- the properties ------------------------------------------------------------------------


@thorough
@given(size=SIZES, schedule=schedules(ORDINARY), seed=SEEDS)
def test_values_live_as_long_as_references_whatever_the_order(
    size: Any, schedule: Any, seed: Any
) -> None:
    run(size, schedule, seed)


@thorough
@given(size=SIZES, schedule=schedules(WITH_LOSSES), seed=SEEDS)
def test_nothing_is_kept_for_the_dead_and_nothing_taken_from_the_living(
    size: Any, schedule: Any, seed: Any
) -> None:
    run(size, schedule, seed)


# -- sequences that once went wrong --------------------------------------------------------


def finish(network: Network) -> None:
    for seed in range(20):
        copied = copy.deepcopy(network)
        copied.finish(random.Random(seed))


def only(network: Network, kind: str, to: int) -> Packet:
    [packet] = [p for p in network.under_way if (p.kind, p.to) == (kind, to)]
    return packet


def test_a_fork_arrives_when_its_owner_is_known_to_be_gone() -> None:
    network = Network(3)
    network.create(0, 1)
    network.hand_on(network.handles[0], 2)
    network.kill(1)
    network.notice(2, 1)
    network.deliver(only(network, "fork", 2))
    assert network.machines[2].idle
    finish(network)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_fork_is_handed_on_when_its_owner_or_receiver_is_known_to_be_gone(gone: int) -> None:
    network = Network(3)
    network.create(0, 1)
    network.kill(gone)
    network.notice(0, gone)
    network.hand_on(network.handles[0], 2)
    assert network.machines[0].idle
    finish(network)


@pytest.mark.parametrize("noticed_first", [True, False])
def test_a_message_to_the_dead_is_taken_back_at_the_owner(noticed_first: bool) -> None:
    network = Network(2)
    network.create(0, 0)
    network.kill(1)
    if noticed_first:
        network.notice(0, 1)
    network.hand_on(network.handles[0], 1, cancelled=True)
    finish(network)


def test_a_late_word_from_the_dead_keeps_nothing() -> None:
    network = Network(3)
    network.create(0, 1)
    network.deliver(only(network, "create", 1))
    network.hand_on(network.handles[0], 2)
    network.deliver(only(network, "fork", 2))
    network.kill(2)
    network.notice(0, 2)
    network.drop(network.handles[0])
    delete, add = (
        next(p for p in network.under_way if (p.kind, p.sender) == ("message", sender))
        for sender in (0, 2)
    )
    network.deliver(delete)
    network.deliver(add)
    finish(network)


def test_an_end_that_comes_before_its_beginning() -> None:
    owner = References(0)
    rref_id, fork_id = GloballyUniqueId(1, 0), GloballyUniqueId(1, 1)
    owner.handle(1, ReferenceMessage(Verb.DELETE, 0, rref_id, fork_id))
    assert owner.freed == []
    assert len(owner) == 1
    owner.add(rref_id, fork_id, 1)
    assert owner.freed == [rref_id]
    assert len(owner) == 0


def test_a_child_that_is_heard_of_before_its_parent() -> None:
    owner = References(0)
    rref_id, parent, child = (GloballyUniqueId(1, number) for number in range(3))
    owner.handle(2, ReferenceMessage(Verb.ADD, 0, rref_id, child, 1, parent))
    owner.handle(2, ReferenceMessage(Verb.DELETE, 1, rref_id, child))
    assert owner.freed == []  # the parent lives: its beginning is under way
    owner.add(rref_id, parent, 1)
    assert owner.freed == []
    owner.handle(1, ReferenceMessage(Verb.DELETE, 0, rref_id, parent))
    assert owner.freed == [rref_id]


def holders(owner: References, rref_id: GloballyUniqueId) -> list[int]:
    return sorted(owner._owned[rref_id].forks.values())


def test_holders_are_listed_by_fork() -> None:
    owner = References(0)
    rref_id = GloballyUniqueId(0, 0)
    owner.retain(rref_id)
    assert holders(owner, rref_id) == []
    for number, receiver in enumerate([2, 1, 2]):
        owner.fork(Fork(rref_id, GloballyUniqueId(0, 1 + number), 0), None, receiver)
    assert holders(owner, rref_id) == [1, 2, 2]
    owner.on_member_lost(2)
    assert holders(owner, rref_id) == [1]


# -- the bytes -----------------------------------------------------------------------------

IDS = st.builds(GloballyUniqueId, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
RANKS = st.integers(0, 2**32 - 1)


MESSAGES = st.builds(
    ReferenceMessage, st.sampled_from(Verb), st.integers(0, 2**64 - 1), IDS, IDS, RANKS, IDS
)


@given(st.lists(MESSAGES))
def test_messages_survive_as_bytes(messages: Any) -> None:
    data = b"".join(message.pack() for message in messages)
    assert ReferenceMessage.parse_all(data) == messages


@given(st.lists(st.builds(Fork, IDS, IDS, RANKS, IDS)))
def test_forks_survive_as_bytes(forks: Any) -> None:
    assert Fork.unpack_all(b"".join(fork.pack() for fork in forks)) == forks


@given(st.binary(max_size=100))
def test_bytes_that_are_no_message_are_refused(data: Any) -> None:
    try:
        messages = ReferenceMessage.parse_all(data)
    except ProtocolError:
        return
    assert b"".join(message.pack() for message in messages) == data


@given(st.binary(max_size=200))
def test_bytes_that_are_no_forks_are_refused(data: Any) -> None:
    try:
        forks = Fork.unpack_all(data)
    except ProtocolError:
        return
    assert b"".join(fork.pack() for fork in forks) == data


# -- the properties can fail ---------------------------------------------------------------


class ForgetsParents(References):
    def _announce(self, rref_id: Any, *parent_and_holders: Any) -> None:
        self._owned[rref_id]


class ForgetsEarlyEnds(References):
    def _delete(self, rref_id: Any, fork_id: Any, sender: Any) -> None:
        self._owned[rref_id].forks.pop(fork_id, None)
        self._free_if_unused(rref_id)


class DoesNotWaitForChildren(References):
    def _end_if_unused(self, fork_id: Any) -> None:
        if fork_id in self._held:
            self._held[fork_id].children.clear()
            super()._end_if_unused(fork_id)


class ReadsRepeats(References):
    def handle(self, sender: Any, message: Any) -> None:
        self._serials_in.pop(sender, None)
        super().handle(sender, message)


class ListsForksOnArrivalOnly(References):
    def fork(self, fork: Any, parent: Any, receiver: Any) -> None:
        if parent is not None:
            super().fork(fork, parent, receiver)


class NeverDeletes(References):
    def _end_if_unused(self, fork_id: Any) -> None:
        held = self._held[fork_id]
        if not held.handles and not held.children:
            del self._held[fork_id]


class KeepsForksOfTheDead(References):
    def on_member_lost(self, rank: Any) -> None:
        self._lost.add(rank)


@pytest.mark.parametrize(
    ("mutant", "steps"),
    [
        (ForgetsParents, ORDINARY),
        (ForgetsEarlyEnds, ORDINARY),
        (DoesNotWaitForChildren, ORDINARY),
        (ReadsRepeats, ORDINARY),
        (ListsForksOnArrivalOnly, ORDINARY),
        (NeverDeletes, ORDINARY),
        (KeepsForksOfTheDead, WITH_LOSSES),
    ],
)
def test_a_broken_protocol_is_found_out(mutant: Any, steps: Any) -> None:
    # Random schedules of a fixed seed: how soon hypothesis finds one is not the point here.
    source = random.Random(0)
    for seed in range(3000):
        schedule = [
            (source.choice(steps), source.randrange(12), source.randrange(12)) for _ in range(40)
        ]
        try:
            run(3, schedule, seed, mutant)
        except (Violation, KeyError):
            return
    pytest.fail(f"no schedule shows that {mutant.__name__} is broken")


def pair_with_fork() -> tuple[References, Fork]:
    """A user that holds a fork of rank 0's."""
    user, fork = References(1), Fork(GloballyUniqueId(0, 1), GloballyUniqueId(0, 2), 0)
    user.receive(fork, 0)
    return user, fork


def test_a_fork_that_comes_twice_ends_with_its_last_handle() -> None:
    user, fork = pair_with_fork()
    user.receive(fork, 0)
    user.drop(fork.fork_id)
    assert user.outgoing == []
    user.drop(fork.fork_id)
    assert [(to, message.verb) for to, message in user.outgoing] == [(0, Verb.DELETE)]
    assert len(user) == 0


def test_a_fork_that_comes_again_after_its_end_is_none() -> None:
    user, fork = pair_with_fork()
    user.drop(fork.fork_id)
    before = list(user.outgoing)
    user.receive(fork, 0)
    user.drop(fork.fork_id)
    assert user.outgoing == before
    assert len(user) == 0
    # Not for ever.
    for number in range(100):
        other = Fork(GloballyUniqueId(0, 1), GloballyUniqueId(0, 3 + number), 0)
        user.receive(other, 0)
        user.drop(other.fork_id)
    assert len(user._ended) < 100


def test_what_is_known_does_not_grow_after_a_message_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are admitted once each, however late within some bounds."""
    monkeypatch.setattr(protocol, "_MAX_AHEAD", 8)
    serials = protocol._Serials()
    lost = {3, 11, 12}
    numbers = [number for number in range(200) if number not in lost]
    numbers[50], numbers[55] = numbers[55], numbers[50]
    admitted = []
    for number in numbers:
        admitted.append(serials.admit(number))
        assert len(serials.ahead) <= 8
    assert all(admitted)
    assert (serials.next, serials.ahead) == (200, set())
    assert not any(serials.admit(number) for number in range(200))
