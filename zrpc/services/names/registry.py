"""The rules of names that are unique in a mesh. No I/O: events in, messages out.

Who holds a name is written down at its *holder* alone, the owner of the actor. So a name is lost
with its holder, and with nobody else. One member at a time is the *arbiter*. All claims and
questions go to it, and it grants a name to the first who claims it. What it knows, it has from the
holders: there is no copy that could be wrong after a failure.

======= ================== ================================================================
message from, to           meaning
======= ================== ================================================================
ASK     asker, arbiter     who holds this name? If nobody: I want it, or tell me when somebody does
HELD    arbiter, asker     this one does; maybe you, from now on
FREE    holder, arbiter    I no longer hold this name, or no longer ask
COLLECT arbiter, all       my term has begun: which names do you hold?
        member, arbiter    another's term has begun, a later one
REPORT  member, arbiter    these
LOSE    arbiter, holder    somebody else has your name by a later grant
======= ================== ================================================================

*Terms.* A member that is asked, and knows of no arbiter that lives, begins a term, with a greater
number (``Ballot``) than any it knows. The first to be asked is the living member with the lowest
id, and later the arbiter of the last term. The new arbiter answers nothing before it has a report
from all members that live, as far as it knows. A member that reports has promised to take part in
no earlier term: it accepts a name only if the grant is of the very term that it reported to last.
So a name granted by an earlier arbiter is either in the report, or never accepted.

*Members that join* hold nothing that the arbiter doesn't know: no worker can find them before all
members know them. The arbiter asks them too as soon as it knows of them, and answers nothing
meanwhile. One with a lower id than the arbiter's changes nothing: it learns of the term as it
reports, or is refused if it begins one.

*Messages* may be reordered, repeated or lost. A question is repeated until it is answered
(``NameRegistry.repeat``), and so is COLLECT. A FREE that is lost leaves a name taken in the
arbiter's table. Who is told of that holder asks it, and a holder that is asked in vain says FREE
once more (``NameRegistry.deny``).

*Workers that lose each other*, though both live, are dead for each other. If a worker has lost the
arbiter, and others have not, it asks another member, which begins a new term; the old arbiter
learns of it from all who still see it. If an arbiter had granted the name of a holder that it has
lost, and a later one sees both, the later grant counts (LOSE).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection
from functools import singledispatchmethod

from zrpc.services.names.messages import (
    NO_BALLOT,
    Ask,
    Ballot,
    Collect,
    Free,
    Grant,
    Held,
    Holder,
    Lose,
    NameMessage,
    Report,
)
from zrpc.wire.member_id import MemberId


class NameRegistry:
    """One worker's part: as asker, as holder, and as arbiter if it is.

    For one thread at a time. After each event the caller takes what has gathered in `outgoing`,
    messages to send, each with its receiver; in `settled`, the numbers of questions with their
    answers; and in `lost`, names that this worker no longer holds, with their numbers.

    Args:
        own_id: this worker.
        found: returns the living members that can be called, this worker included.
        known: returns these, and those that are about to join.
    """

    def __init__(
        self,
        own_id: MemberId,
        found: Callable[[], Collection[MemberId]],
        known: Callable[[], Collection[MemberId]],
    ) -> None:
        self._own_id = own_id
        self._found = found
        self._known = known
        self._numbers = itertools.count(1)
        self._promised = NO_BALLOT  # the latest term that this worker knows of
        self._held: dict[str, tuple[int, Grant]] = {}
        self._asks: dict[int, tuple[str, bool, Holder | None]] = {}
        # Of the arbiter: who was asked to report, and has done so; the names, the last serial
        # number, and questions that have no answer yet, in the order of arrival.
        self._called: set[MemberId] = set()
        self._heard: set[MemberId] = set()
        self._table: dict[str, tuple[Holder, Grant]] = {}
        self._serial = 0
        self._waiting: dict[Holder, Ask] = {}
        self._to_self: deque[NameMessage] = deque()
        self.outgoing: list[tuple[MemberId, NameMessage]] = []
        self.settled: list[tuple[int, Holder]] = []
        self.lost: list[tuple[str, int]] = []

    # -- the asker and the holder ----------------------------------------------------------

    def ask(self, name: str, claims: bool, past: Holder | None = None) -> int:
        """Asks who holds a name, or claims it; returns the number that is settled later.

        A claim is granted if the answer has this worker's id and this number. With ``past``, the
        answer is the next holder after that one.
        """
        number = next(self._numbers)
        self._asks[number] = name, claims, past
        self._send_ask(number)
        self._work()
        return number

    def free(self, name: str, number: int) -> None:
        """Gives up a name, or a question."""
        self._asks.pop(number, None)
        if self.holds(name, number):
            del self._held[name]
        self.deny(name, number)

    def deny(self, name: str, number: int) -> None:
        """Says once more that this worker doesn't hold a name by this claim, unless it does."""
        if self.holds(name, number):
            return
        self._send(self._arbiter(), Free(name, number))
        self._work()

    def holds(self, name: str, number: int) -> bool:
        """Returns whether this worker holds a name by this claim."""
        return name in self._held and self._held[name][0] == number

    @property
    def claiming(self) -> bool:
        """Whether a claim of this worker is not settled."""
        return any(claims for _, claims, _ in self._asks.values())

    def repeat(self) -> None:
        """Sends again what has no answer; to be called now and then."""
        for number in list(self._asks):
            self._send_ask(number)
        if self._is_arbiter and self._waiting:
            self._called.clear()
            self._answer()
        self._work()

    def on_member_lost(self, member: MemberId) -> None:
        """Frees the names of a member that is lost, and asks another arbiter if it was it."""
        self._heard.discard(member)
        self._table = {n: entry for n, entry in self._table.items() if entry[0].member != member}
        self._waiting = {a: ask for a, ask in self._waiting.items() if a.member != member}
        for number in list(self._asks):
            self._send_ask(number)
        if self._is_arbiter:
            self._answer()
        self._work()

    def handle(self, sender: MemberId, message: NameMessage) -> None:
        """Handles a message."""
        self._on(message, sender)
        self._work()

    def _work(self) -> None:
        """Handles what this worker has sent to itself."""
        while self._to_self:
            self._on(self._to_self.popleft(), self._own_id)

    def _send(self, to: MemberId, message: NameMessage) -> None:
        if to == self._own_id:
            self._to_self.append(message)
        else:
            self.outgoing.append((to, message))

    def _arbiter(self) -> MemberId:
        """Returns whom to ask."""
        found = self._found()
        return self._promised.arbiter if self._promised.arbiter in found else min(found)

    def _send_ask(self, number: int) -> None:
        name, claims, past = self._asks[number]
        lost = self._promised.arbiter not in self._found()
        asker = Holder(self._own_id, number)
        ask = Ask(name, asker, claims, past, self._promised if lost else NO_BALLOT)
        self._send(self._arbiter(), ask)

    @singledispatchmethod
    def _on(self, message: NameMessage, sender: MemberId) -> None:
        raise NotImplementedError(message)

    @_on.register
    def _(self, held: Held, sender: MemberId) -> None:
        granted = held.holder == (self._own_id, held.number)
        if granted and held.grant.ballot != self._promised:
            return  # of an earlier term: the present arbiter knows nothing of it, and is asked
        if self._asks.pop(held.number, None) is None:
            if granted and not self.holds(held.name, held.number):
                self._send(sender, Free(held.name, held.number))
            return
        if granted:
            self._held[held.name] = held.number, held.grant
        self.settled.append((held.number, held.holder))

    @_on.register
    def _(self, lose: Lose, _sender: MemberId) -> None:
        if self.holds(lose.name, lose.number):
            del self._held[lose.name]
            self.lost.append((lose.name, lose.number))

    @_on.register
    def _(self, collect: Collect, _sender: MemberId) -> None:
        ballot = collect.ballot
        if ballot < self._promised:
            self._send(ballot.arbiter, Collect(self._promised))
            return
        if ballot > self._promised:
            self._promise(ballot)
        names = [(name, number, grant) for name, (number, grant) in self._held.items()]
        self._send(ballot.arbiter, Report(ballot, names))

    def _promise(self, ballot: Ballot) -> None:
        """Takes part in a later term, which another member has begun."""
        before, self._promised = self._promised, ballot
        if before.arbiter == self._own_id:
            waiting, self._waiting = self._waiting, {}
            for ask in waiting.values():
                self._send(self._arbiter(), ask)
            self._table.clear()
        elif before.arbiter != ballot.arbiter and before.arbiter in self._found():
            # The new arbiter may have lost it.
            self._send(before.arbiter, Collect(ballot))
        for number in list(self._asks):
            self._send_ask(number)

    # -- the arbiter -----------------------------------------------------------------------

    @property
    def _is_arbiter(self) -> bool:
        return self._promised.arbiter == self._own_id

    @_on.register
    def _(self, ask: Ask, _sender: MemberId) -> None:
        if ask.asker.member not in self._known():
            return
        if not self._is_arbiter:
            arbiter = self._promised.arbiter
            if arbiter in self._found() and self._promised != ask.unreachable:
                self._send(arbiter, ask)
                return
            self._begin_term(self._promised)
        self._waiting[ask.asker] = ask
        self._answer()

    def _begin_term(self, last: Ballot) -> None:
        self._promised = Ballot(last.epoch + 1, self._own_id)
        self._called, self._heard = set(), {self._own_id}
        self._serial = 0
        self._table = {
            name: (Holder(self._own_id, number), grant)
            for name, (number, grant) in self._held.items()
        }

    @_on.register
    def _(self, report: Report, sender: MemberId) -> None:
        if report.ballot != self._promised or sender in self._heard:
            return
        if sender not in self._known():
            return
        self._heard.add(sender)
        for name, number, grant in report.names:
            self._enter(name, Holder(sender, number), grant)
        self._answer()

    def _enter(self, name: str, holder: Holder, grant: Grant) -> None:
        """Enters what a holder has reported; of two holders, the one with the later grant."""
        other = self._table.get(name)
        if other is not None and other[0] != holder:
            (loser, _), winner = sorted([other, (holder, grant)], key=lambda entry: entry[1])
            holder, grant = winner
            self._send(loser.member, Lose(name, loser.number))
        self._table[name] = holder, grant

    @_on.register
    def _(self, free: Free, sender: MemberId) -> None:
        holder = Holder(sender, free.number)
        self._waiting.pop(holder, None)
        if self._is_arbiter and free.name in self._table and self._table[free.name][0] == holder:
            del self._table[free.name]
            self._answer()

    def _answer(self) -> None:
        """Answers what can be answered, once all members have reported."""
        missing = set(self._known()) - self._heard
        if missing and self._waiting:
            for member in missing - self._called:
                self._called.add(member)
                self._send(member, Collect(self._promised))
        if missing:
            return
        for asker, ask in self._waiting.items():
            if ask.claims and ask.name not in self._table:
                self._serial += 1
                self._table[ask.name] = asker, Grant(self._promised, self._serial)
        for asker, ask in list(self._waiting.items()):
            entry = self._table.get(ask.name)
            if entry is not None and entry[0] != ask.past:
                del self._waiting[asker]
                self._send(asker.member, Held(ask.name, asker.number, *entry))
