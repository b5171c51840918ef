"""The graceful shutdown's rules, against delay and loss."""

from __future__ import annotations

import random
from collections import Counter, deque
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.agent.termination import Step, Termination, TerminationMessage
from zrpc.errors import ProtocolError


class Violation(AssertionError):
    """The protocol has broken one of its promises."""


class Mesh:
    """Workers that send each other work, and shut down.

    A message of the program makes its receiver busy; a busy worker may send more, and becomes
    idle. Messages between two workers stay in order, as they do on a socket; between different
    pairs they overtake each other. The messages of a dead worker may be lost from some point on.
    """

    def __init__(self, size: Any) -> None:
        self.machines = {rank: Termination(rank, range(size)) for rank in range(size)}
        self.channels = {(a, b): deque() for a in range(size) for b in range(size)}
        self.busy = dict.fromkeys(range(size), 1)
        self.begun = set()
        self.left = set()
        self.dead = set()
        self.unaware = set()
        self.noticed = set()
        self.cut = set()
        self.out = set()
        self.lost_proceed = False
        self.sent = {rank: dict.fromkeys(range(size), 0) for rank in range(size)}
        self.received = {rank: dict.fromkeys(range(size), 0) for rank in range(size)}

    @property
    def living(self) -> Any:
        return [rank for rank in self.machines if rank not in self.dead]

    @property
    def present(self) -> Any:
        """The living that have not left yet."""
        return [rank for rank in self.living if rank not in self.left]

    # what programs do

    def work(self, sender: Any, receiver: Any) -> None:
        if self.busy[sender] and sender not in self.left:
            self.sent[sender][receiver] += 1
            self.channels[sender, receiver].append("work")

    def rest(self, rank: Any) -> None:
        self.busy[rank] = max(0, self.busy[rank] - 1)

    def begin(self, rank: Any) -> None:
        if rank not in self.begun:
            self.begun.add(rank)
            self._post(rank, self.machines[rank].begin())

    # what the network does

    def deliver(self, sender: Any, receiver: Any) -> None:
        content = self.channels[sender, receiver].popleft()
        if receiver in self.left or receiver in self.dead:
            return
        if content == "work" and (receiver, sender) in self.noticed:
            return  # as of a stranger
        if content == "work":
            self.received[receiver][sender] += 1
            self.busy[receiver] += 1
        else:
            message = TerminationMessage.parse(content.pack())
            self._post(receiver, self.machines[receiver].receive(sender, message))

    def look(self, rank: Any) -> None:
        """Answers the leader if the worker is idle, as an agent does now and then."""
        machine = self.machines[rank]
        if machine.asked and not self.busy[rank] and not self._disagrees(rank):
            known = [other for other in self.machines if (rank, other) not in self.noticed]
            sent = sum(self.sent[rank][other] for other in known)
            received = sum(self.received[rank][other] for other in known)
            self._post(rank, machine.idle(sent, received))

    def kill(self, rank: Any) -> None:
        self.dead.add(rank)
        self.unaware |= {(other, rank) for other in self.living}

    def cut_off(self, one: Any, other: Any) -> None:
        """Each of two that live will find the other lost, at its own time."""
        if one != other and not {(one, other), (other, one)} & (self.cut | self.noticed):
            self.cut |= {(one, other), (other, one)}
            self.unaware |= {(one, other), (other, one)} - self.unaware

    def agree(self, one: Any, other: Any) -> None:
        """Others decide which of two goes; all will learn of it, at their own times."""
        out = max(one, other)
        self.out.add(out)
        for rank in self.living:
            if rank != out:
                self.unaware |= {(rank, out), (out, rank)} - self.noticed

    def undecided(self) -> Any:
        """The pairs of living workers that have lost each other, though neither of them is out."""
        return [
            pair
            for pair in sorted(self.cut)
            if pair in self.noticed and not (self.dead | self.out | self.left) & set(pair)
        ]

    def _disagrees(self, rank: Any) -> bool:
        return any(rank in pair for pair in self.undecided())

    def notice(self, rank: Any, dead: Any) -> None:
        self.unaware.remove((rank, dead))
        self.noticed.add((rank, dead))
        if rank not in self.left:
            self._post(rank, self.machines[rank].on_member_lost(dead))

    def lose_rest(self, sender: Any, receiver: Any) -> None:
        if sender in self.dead:
            self.channels[sender, receiver].clear()

    def lose_word(self, sender: Any, receiver: Any) -> None:
        """Loses the last message that was sent, if it is one of the protocol."""
        channel = self.channels[sender, receiver]
        if channel[-1] != "work":
            # A worker that leaves is found gone, even if no message says so.
            self.lost_proceed |= channel.pop().step is Step.PROCEED

    def remind(self, rank: Any) -> None:
        self._post(rank, self.machines[rank].remind())

    # what must hold

    def _post(self, rank: Any, outgoing: Any) -> None:
        for to, message in outgoing:
            assert to != rank, "messages to oneself are handled at once"
            self.channels[rank, to].append(message)
        if self.machines[rank].done and rank not in self.left:
            self._check(rank)
            self.left.add(rank)

    def _check(self, rank: Any) -> None:
        if rank not in self.begun:
            raise Violation(f"{rank} has left though it did not shut down")
        others = [
            other
            for other in self.living
            if other not in self.begun | self.out and (rank, other) not in self.noticed
        ]
        if others:
            raise Violation(f"{rank} has left though {others} have not begun to shut down")
        busy = [other for other in self.living if self.busy[other]]
        in_flight = [
            pair
            for pair, channel in self.channels.items()
            if "work" in channel and not self.dead & set(pair)
        ]
        # After a loss nobody can know which of the counted messages were the dead worker's.
        if (busy or in_flight) and not self.dead and not self.cut:
            raise Violation(f"{rank} has left though {busy} are busy, {in_flight} in flight")

    def finish(self, order: Any, rounds: Any = 6000) -> None:
        """Lets all workers become idle and shut down, and checks that they do."""
        for rank in self.living:
            self.begin(rank)
        left_to_do = 10
        for _ in range(rounds):
            present = self.present
            if not present:
                return
            moves = [(self.look, (rank,)) for rank in present]
            moves += [(self.rest, (rank,)) for rank in present if self.busy[rank]]
            moves += [(self.deliver, pair) for pair, queue in self.channels.items() if queue]
            moves += [(self.notice, pair) for pair in sorted(self.unaware)]
            moves += [(self.agree, pair) for pair in self.undecided()]
            if not any(self.channels.values()):  # they are rare, in comparison
                moves += [(self.remind, (rank,)) for rank in present]
            # A leader may have died after it let only some go: the others find these gone.
            if self.lost_proceed or self.cut or self.dead:
                pairs = {(rank, left) for rank in present for left in self.left} - self.noticed
                self.unaware |= pairs
            if left_to_do:
                busy = [rank for rank in present if self.busy[rank]]
                moves += [(self.work, (a, b)) for a in busy for b in self.living]
            move, arguments = order.choice(moves)
            move(*arguments)
            left_to_do -= move == self.work
        raise Violation(f"{self.present} never leave")


STEPS = ("work", "work", "rest", "begin", "look", "look", "deliver", "deliver", "deliver")
SCHEDULES = {
    "work": STEPS,
    "deaths": (*STEPS, "kill", "notice", "lose rest"),
    "lost messages": (*STEPS, "remind", "lose word", "lose word"),
    "cuts": (*STEPS, "cut", "notice", "notice", "agree", "kill", "remind"),
}


def run(size: Any, schedule: Any, seed: Any) -> None:
    mesh = Mesh(size)
    for what, first, second in schedule:
        present = mesh.present
        if not present:
            break
        rank, other = present[first % len(present)], second % size
        queued = [pair for pair, channel in mesh.channels.items() if channel]
        unaware = sorted(mesh.unaware)
        if what == "work":
            mesh.work(rank, other)
        elif what in ("rest", "begin", "look", "remind"):
            getattr(mesh, what)(rank)
        elif what == "lose word" and queued:
            mesh.lose_word(*queued[second % len(queued)])
        elif what == "deliver" and queued:
            mesh.deliver(*queued[second % len(queued)])
        elif what == "lose rest" and queued:
            mesh.lose_rest(*queued[second % len(queued)])
        elif what == "kill" and len(mesh.living) > 1:
            mesh.kill(rank)
        elif what == "cut" and other in present:
            mesh.cut_off(rank, other)
        elif what == "agree" and mesh.undecided():
            mesh.agree(*mesh.undecided()[first % len(mesh.undecided())])
        elif what == "notice" and unaware:
            mesh.notice(*unaware[first % len(unaware)])
    mesh.finish(random.Random(seed))


@pytest.mark.system
@pytest.mark.parametrize("steps", SCHEDULES.values(), ids=SCHEDULES)
@settings(max_examples=200)
@given(st.integers(0, 2**64 - 1))
def test_all_that_live_leave_but_not_before_all_work_is_done(steps: Any, seed: int) -> None:
    """And none before all that it has not lost have begun to shut down."""
    source = random.Random(seed)  # since to draw each step takes longer than the rest
    size, count = source.randint(1, 6), source.randint(0, 60)
    ranks = [(source.randrange(12), source.randrange(12)) for _ in range(count)]
    run(size, [(source.choice(steps), *pair) for pair in ranks], seed)


def test_the_others_leave_if_a_leader_dies_that_has_let_only_one_go() -> None:
    rest, kill = ("rest", 1, 0), ("kill", 10, 0)
    work = [("work", *pair) for pair in ((1, 4), (1, 9), (7, 3), (10, 8), (2, 0), (6, 1), (11, 3))]
    later = [("begin", 2, 0), ("deliver", 2, 1), ("deliver", 11, 7), ("work", 9, 11)]
    run(5, [rest, kill, *work, ("work", 11, 4), *later, kill], 28643)


# -- single steps --------------------------------------------------------------------------


def test_the_leader_knows_which_ranks_are_missing_and_what_does_not_count() -> None:
    """The loss of a stranger or of itself, a stranger's word, and the counts that nobody asks."""
    leader = Termination(0, range(4))
    leader.begin()
    leader.receive(2, TerminationMessage(Step.JOIN))
    assert leader.missing == [1, 3]
    leader.on_member_lost(3)
    assert leader.on_member_lost(5) == leader.on_member_lost(0) == []
    assert leader.receive(7, TerminationMessage(Step.JOIN)) == []
    assert leader.waits_for_all
    assert leader.missing == [1]
    other = Termination(1, range(4))
    assert other.missing == other.idle(3, 3) == []


def test_counts_of_an_earlier_round_do_not_count() -> None:
    leader = Termination(0, [0, 1])
    leader.begin()
    leader.receive(1, TerminationMessage(Step.JOIN))
    leader.receive(1, TerminationMessage(Step.COUNTS, 0, 0, 0))
    leader.idle(0, 0)
    assert not leader.done
    assert not leader.asked  # it waits for the counts of this round


@given(st.sampled_from(Step), st.integers(0, 2**32 - 1), *[st.integers(0, 2**64 - 1)] * 2)
def test_messages_survive_as_bytes(step: Step, number: int, sent: int, received: int) -> None:
    message = TerminationMessage(step, number, sent, received)
    assert TerminationMessage.parse(message.pack()) == message


@given(st.binary(max_size=40))
def test_bytes_that_are_no_message_are_refused(data: Any) -> None:
    try:
        message = TerminationMessage.parse(data)
    except ProtocolError:
        return
    assert message.pack() == data


def test_a_worker_that_comes_while_the_others_are_asked_is_waited_for() -> None:
    leader = Termination(0, [0, 1])
    leader.begin()
    join, counts = TerminationMessage(Step.JOIN), partial(TerminationMessage, Step.COUNTS)
    assert leader.receive(1, join) == [(1, TerminationMessage(Step.PROBE, 1))]
    for number in (1, 2):
        leader.idle(0, 0)
        if number == 2:
            leader.admit(2)
        asked = leader.receive(1, counts(number))
        assert asked == ([(1, TerminationMessage(Step.PROBE, 2))] if number == 1 else [])
    assert not leader.done
    assert leader.missing == [2]
    probes = leader.receive(2, join)
    assert probes == [(rank, TerminationMessage(Step.PROBE, 3)) for rank in (1, 2)]


def test_a_loss_in_what_would_be_the_last_round_leads_to_another() -> None:
    """As what a program does about a loss is waited for, too."""
    leader, counts = Termination(0, range(3)), partial(TerminationMessage, Step.COUNTS)
    leader.begin()
    for member in (1, 2):
        leader.receive(member, TerminationMessage(Step.JOIN))
    for number, others in ((1, [1, 2]), (2, [1])):
        leader.idle(0, 0)
        leader.receive(2, counts(number))
        if number == 2:
            leader.on_member_lost(2)
        probe = TerminationMessage(Step.PROBE, number + 1)
        assert leader.receive(1, counts(number)) == [(other, probe) for other in others]
    assert not leader.done


def test_a_member_knows_that_all_have_begun_when_leaders_ask_that_count_them() -> None:
    member, leader = Termination(2, [0, 1, 2]), Termination(0, [0, 1, 2])
    member.begin()
    leader.begin()
    leader.receive(2, TerminationMessage(Step.JOIN))
    assert not member.all_begun
    assert not leader.all_begun
    probes = leader.receive(1, TerminationMessage(Step.JOIN))
    assert leader.all_begun
    member.receive(0, dict(probes)[2])
    assert member.all_begun
    member.admit(3)
    assert not member.all_begun


# -- many members --------------------------------------------------------------------------


class ManyMembers:
    """Idle members whose messages are delivered in order; counts what each of them sends."""

    def __init__(self, size: int) -> None:
        self.machines = {rank: Termination(rank, range(size)) for rank in range(size)}
        self.queue: deque[tuple[int, int, TerminationMessage]] = deque()
        self.sent: Counter[int] = Counter()

    def post(self, sender: int, outgoing: list[tuple[int, TerminationMessage]]) -> None:
        self.sent[sender] += len(outgoing)
        self.queue += [(sender, to, message) for to, message in outgoing if to in self.machines]

    def begin(self) -> None:
        for rank, machine in self.machines.items():
            self.post(rank, machine.begin())

    def lose(self, ranks: range) -> None:
        """Ends members; each of the others then finds all of them lost, one after another."""
        for rank in ranks:
            del self.machines[rank]
        for rank, machine in self.machines.items():
            for lost in ranks:
                self.post(rank, machine.on_member_lost(lost))

    def run(self) -> None:
        """Delivers messages until there are no more."""
        while self.queue or any(machine.asked for machine in self.machines.values()):
            if self.queue:
                sender, to, message = self.queue.popleft()
                if to in self.machines:
                    self.post(to, self.machines[to].receive(sender, message))
                continue
            for rank, machine in self.machines.items():
                if machine.asked:
                    self.post(rank, machine.idle(0, 0))


def test_a_leader_of_256_members_asks_once_for_each_round_though_half_are_lost_in_it() -> None:
    mesh = ManyMembers(256)
    mesh.begin()
    while mesh.machines[0].missing:
        sender, to, message = mesh.queue.popleft()
        mesh.post(to, mesh.machines[to].receive(sender, message))
    mesh.lose(range(128, 256))  # while it waits for the counts of all
    mesh.run()
    assert all(machine.done for machine in mesh.machines.values())
    # The first round, which is void, then two rounds and the word to leave for those that live.
    assert mesh.sent[0] <= 255 + 3 * 127
    assert max(mesh.sent[rank] for rank in range(1, 128)) <= 4
