"""Workers that claim names over a network that reorders, repeats and loses messages."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from zrpc.services.names.messages import (
    NO_BALLOT,
    Ballot,
    Collect,
    Holder,
    NameMessage,
    dump,
    parse,
)
from zrpc.services.names.registry import NameRegistry
from zrpc.wire.member_id import MemberId

NAMES = ("a", "b")
WITHOUT_LOSSES = ("claim", "claim", "watch", "deliver", "deliver", "deliver", "free")
ALL = (*WITHOUT_LOSSES, "deliver", "repeat", "drop", "again", "kill", "notice", "introduce", "find")
# The arbiter dies again and again, and the others notice that one by one.
DEPOSED = (*WITHOUT_LOSSES, *6 * ("deliver",), "again", "depose", *4 * ("notice",))

Step = tuple[str, int, int]


def schedules(kinds: Iterable[str], least: int = 0) -> st.SearchStrategy[list[Step]]:
    number = st.integers(0, 1000)
    step = st.tuples(st.sampled_from(list(kinds)), number, number)
    return st.lists(step, min_size=least, max_size=max(60, 2 * least))


@dataclass
class Packet:
    sender: MemberId
    to: MemberId
    message: NameMessage


@dataclass
class Member:
    """One worker: what it knows of the others, what its program asks, and what it was granted."""

    registry: NameRegistry
    found: set[MemberId]
    known: set[MemberId]
    claims: dict[int, str] = field(default_factory=dict)
    watches: dict[int, str] = field(default_factory=dict)
    granted: dict[str, int] = field(default_factory=dict)

    def holds(self, name: str) -> bool:
        return name in self.granted and self.registry.holds(name, self.granted[name])


@dataclass
class World:
    members: dict[MemberId, Member] = field(default_factory=dict)
    packets: list[Packet] = field(default_factory=list)
    dead: set[MemberId] = field(default_factory=set)
    joining: MemberId | None = None
    parted: bool = False  # workers that live have lost each other: a name may have two holders
    grants: list[tuple[str, Holder]] = field(default_factory=list)
    ended_claims: int = 0
    questions: list[tuple[MemberId, str, bool, Holder]] = field(default_factory=list)
    term: Ballot = NO_BALLOT  # the latest one that has begun among more than one member

    def add(self, member: MemberId, others: Iterable[MemberId]) -> None:
        known = {member, *others}
        found = set(known)
        registry = NameRegistry(member, lambda: found, lambda: known)
        self.members[member] = Member(registry, found, known)

    @property
    def living(self) -> list[MemberId]:
        return sorted(self.members.keys() - self.dead)

    @property
    def callable(self) -> list[MemberId]:
        return [member for member in self.living if member != self.joining]

    # -- what happens ----------------------------------------------------------------------

    def claim(self, at: MemberId, name: str) -> None:
        self.ask(at, name, True)

    def watch(self, at: MemberId, name: str) -> None:
        self.ask(at, name, False)

    def ask(self, at: MemberId, name: str, claims: bool, past: Holder | None = None) -> None:
        member = self.members[at]
        asks = member.claims if claims else member.watches
        asks[member.registry.ask(name, claims, past)] = name
        self.settle(at)

    def free(self, at: MemberId, name: str) -> None:
        member = self.members[at]
        if member.holds(name):
            member.registry.free(name, member.granted[name])
        self.settle(at)

    def deliver(self, packet: Packet) -> None:
        receiver = self.members[packet.to]
        if packet.to in self.dead or packet.sender not in receiver.known:
            return  # messages of the lost are not heard
        receiver.registry.handle(packet.sender, parse(dump(packet.message)))
        self.settle(packet.to)

    def kill(self, member: MemberId) -> None:
        self.dead.add(member)
        if member == self.joining:
            self.joining = None

    def notice(self, at: MemberId, gone: MemberId) -> None:
        member = self.members[at]
        if gone in self.dead and gone in member.known:
            member.known.discard(gone)
            member.found.discard(gone)
            member.registry.on_member_lost(gone)
            self.settle(at)

    def begin_join(self, new: MemberId) -> None:
        """A worker begins to join: it knows all, and they get to know it one by one."""
        if self.joining is None and new not in self.members:
            self.add(new, self.living)
            self.joining = new

    def find(self, force: bool = False) -> None:
        """It can be found once all living members know it."""
        if self.joining is None:
            return
        members = [self.members[member] for member in self.living]
        for member in members:
            if force:
                member.known.add(self.joining)
        if all(self.joining in member.known for member in members):
            for member in members:
                member.found.add(self.joining)
            self.joining = None

    def settle(self, at: MemberId) -> None:
        """Sends what a worker has to send, and does what its program does next."""
        member = self.members[at]
        registry = member.registry
        for to, message in registry.outgoing:
            self.packets.append(Packet(at, to, message))
            if isinstance(message, Collect):
                self.term = max(self.term, message.ballot)
        registry.outgoing.clear()
        settled, registry.settled = registry.settled, []
        for number, holder in settled:
            claims = number in member.claims
            name = (member.claims if claims else member.watches).pop(number)
            if holder == (at, number):
                self.grants.append((name, holder))
                member.granted[name] = number
                self.ended_claims += 1
            else:
                self.questions.append((at, name, claims, holder))
        self.check()
        questions, self.questions = self.questions, []
        for question in questions:
            self.question(*question)

    def question(self, at: MemberId, name: str, claims: bool, holder: Holder) -> None:
        """Asks the holder; if it no longer holds the name, or is dead, the next one is wanted."""
        other = self.members[holder.member]
        if at in self.dead:
            return
        if holder.number in other.claims and holder.member not in self.dead:
            self.questions.append((at, name, claims, holder))  # not before its claim is settled
        elif holder.member not in self.dead and other.registry.holds(name, holder.number):
            self.ended_claims += claims
        else:
            if holder.member not in self.dead:
                other.registry.deny(name, holder.number)
                self.settle(holder.member)
            self.ask(at, name, claims, holder)

    # -- what must hold --------------------------------------------------------------------

    def holders(self, name: str) -> list[MemberId]:
        return [m for m in self.living if self.members[m].holds(name)]

    def check(self) -> None:
        for name in NAMES:
            assert self.parted or len(self.holders(name)) <= 1, name

    def finish(self, rng: random.Random) -> None:
        """Lets everything happen that must."""
        self.find(force=True)
        for at in self.living:
            for gone in self.dead:
                self.notice(at, gone)
        for _ in range(6):
            for at in self.living:
                self.members[at].registry.repeat()
                self.settle(at)
            for _ in range(3000):
                if not self.packets:
                    break
                self.deliver(self.packets.pop(rng.randrange(len(self.packets))))
            else:
                raise AssertionError("messages without end")
        for at in self.living:
            member = self.members[at]
            assert not member.claims, f"they have not ended at {at}"
            assert not any(map(self.holders, member.watches.values())), f"{at} was not told of it"


def run(size: int, schedule: list[Step], seed: int, first: int = 3) -> World:
    """Runs a schedule in a mesh whose lowest id is ``first``: others join with lower ones."""
    world, rng = World(), random.Random(seed)
    everyone = [MemberId(first + number) for number in range(size)]
    for member in everyone:
        world.add(member, everyone)
    for kind, one, two in schedule:
        happen(world, kind, one, two)
    world.finish(rng)
    return world


def happen(world: World, kind: str, one: int, two: int) -> None:
    callable_ = world.callable
    at, name = callable_[one % len(callable_)], NAMES[two % len(NAMES)]
    packets = world.packets
    if kind in ("claim", "watch", "free"):
        getattr(world, kind)(at, name)
    elif kind in ("deliver", "drop", "again") and packets:
        place = one % len(packets)
        packet = packets[place] if kind == "again" else packets.pop(place)
        if kind != "drop":
            world.deliver(packet)
    elif kind == "repeat":
        world.members[at].registry.repeat()
        world.settle(at)
    elif kind == "kill" and len(callable_) > 1:
        world.kill(world.living[one % len(world.living)])
    elif kind == "depose" and len(callable_) > 1:
        arbiter = world.term.arbiter
        world.kill(arbiter if arbiter in callable_ else callable_[0])
    elif kind == "notice" and world.dead:
        world.notice(at, sorted(world.dead)[two % len(world.dead)])
    elif kind == "introduce":
        if world.joining is None:
            world.begin_join(MemberId(one % 20))
        else:
            world.members[at].known.add(world.joining)
    elif kind == "find":
        world.find()
