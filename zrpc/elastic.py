"""How a worker joins and leaves a mesh that runs, and hears of others that do.

First it *claims* its name and its rank, in the news (``zrpc.news``, whose rules are
``zrpc.roster``'s). With the number that it then has, its agent starts, and is introduced to all
members by their own reading. Once all have noted that, it says that it is in, and once all have
noted that too, it can be found everywhere.

One thread of each worker reads the news, several times a second, since not every store can tell
when something is there. It uses the store alone; what there is to do to the agent is done in the
agent's I/O thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from zrpc.agent import Agent
from zrpc.card import Card
from zrpc.endpoints import endpoint_of
from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.failure_detector import Reason
from zrpc.item import Departure, Item, Verb
from zrpc.news import News
from zrpc.roster import Change, Roster, What
from zrpc.summary import Summary
from zrpc.transport.address import is_alive
from zrpc.transport.probe import ListenerProbe
from zrpc.worker_info import WorkerInfo

__all__ = ["ElasticLayer", "claim"]

logger = logging.getLogger(__name__)

# How often the news are read, in seconds: as a rule, and where somebody is about to come in.
_EVERY = 0.2
_EVERY_WHEN_AWAITING = 0.05
# So long after an introduction the worker that is about to come in is worth the shorter one.
_AWAIT = 10.0
# So long a worker that is coming in waits for others before it looks after them.
_IMPATIENT_AFTER = 1.0
# So long it waits for those to come back who have left while it was started again.
_COME_BACK_WITHIN = 5.0
# The pauses of a worker that is coming in itself grow from the first number to the second.
_PAUSES = (0.002, 0.05)
# How long somebody else has to say that a worker is gone whose name or rank is asked for.
_DEATH_KNOWN_WITHIN = 2.0
# How long a TCP connection to such a worker may take to be refused.
_REFUSED_WITHIN = 0.5
# How long what a worker that has left had sent may take to come in.
_LAST_WORDS = 2.0
# How long a worker takes at most to say farewell, and for the others of its mesh to do so.
_FAREWELL = 2.0

_REASONS = {
    Departure.LEFT: Reason.LEFT,
    Departure.ENDED: Reason.ENDED,
    Departure.REPLACED: Reason.REPLACED,
    Departure.REFUSED: Reason.REFUSED,
}


def claim(news: News, roster: Roster, card: Card, deadline: float) -> Card:
    """Asks for a name and a rank until they are given.

    Args:
        news: of the mesh; nothing is read yet.
        roster: empty; afterwards it knows who is there.
        card: this worker's; a rank below 0 stands for any that is free.
        deadline: on the clock of ``time.monotonic``.

    Returns:
        The card with its rank and its incarnation.

    Raises:
        RendezvousError: a member that lives has that name or that rank; the sizes differ.
    """
    any_rank = card.rank < 0
    since = time.monotonic()
    while True:
        _catch_up(news, roster)
        news.shorten(roster, len(roster.members))
        taken = {member.rank for member in roster.members.values()}
        while any_rank and (card.rank < 0 or card.rank in taken):
            card = replace(card, rank=news.next_rank())
        if (mismatch := roster.mismatch(card)) is not None:
            raise RendezvousError(mismatch)
        obstacle = roster.obstacle(card)
        if obstacle is None:
            news.post(Item(Verb.JOIN, card.token, card))
            _catch_up(news, roster)
            number = roster.number(card.token)
            if number in roster.members:
                return roster.members[number]
            obstacle = roster.obstacle(card)
            if obstacle is None:
                raise RendezvousError(
                    roster.refusal(card.token)
                    or f"worker {card.name} was suspended while it asked to join the mesh, which "
                    "has gone on without it: start it again"
                )
        if any_rank and obstacle.name != card.name:
            continue  # somebody has chosen that rank meanwhile
        _wait_for_end(news, obstacle, card, min(deadline, since + _DEATH_KNOWN_WITHIN))


def _catch_up(news: News, roster: Roster) -> None:
    for item in news.read():
        roster.read(item)


def _wait_for_end(news: News, other: Card, card: Card, until: float) -> None:
    """Waits a moment where the member that has a name or a rank may have died.

    Raises:
        RendezvousError: it lives, or nobody knows.
    """
    lives = _lives(other, card)
    if lives is False:
        news.post(Item(Verb.GONE, other.token, why=Departure.ENDED))
    elif lives or time.monotonic() > until:
        what = f"rank {card.rank}" if other.rank == card.rank else f"worker name {card.name}"
        raise RendezvousError(
            f"{what} is not unique: worker {other.name} (rank {other.rank}) of this mesh has it, "
            f"and worker {card.name} (rank {card.rank}) asks for it: give it another one, or wait "
            "until that worker is gone"
        )
    else:
        time.sleep(_PAUSES[1])  # others may say it, and the store does not tell when


def _lives(other: Card, card: Card) -> bool | None:
    """Whether another worker lives; None where that can't be seen from here."""
    if card.shares_host(other):
        return is_alive(Path(other.directory))
    if not other.endpoint:
        return None
    probe = ListenerProbe(other.endpoint)
    try:
        deadline = time.monotonic() + _REFUSED_WITHIN
        while probe.listening() is None and probe.pending and time.monotonic() < deadline:
            time.sleep(_PAUSES[0])
        return probe.listening()
    finally:
        probe.close()


class ElasticLayer:
    """Keeps an agent's view of its mesh as the news say.

    Args:
        agent: the agent, which knows nobody but itself.
        news: of its mesh.
        roster: what of them was read, in which the agent's worker was accepted.
    """

    def __init__(self, agent: Agent, news: News, roster: Roster) -> None:
        self.agent = agent
        self._news = news
        self._roster = roster
        self._card = agent.membership.cards[agent.membership.rank]
        self._token = self._card.token
        # Who others have to hear of, why they are gone, and more for a log: written in the I/O
        # thread and in that of the news, read in the latter.
        self._losses: deque[tuple[int, Departure, str]] = deque()
        # When to give up what workers that have left may have sent; for the I/O thread.
        self._leaving: dict[int, float] = {}
        self._noted = -1
        self._have_read: dict[int, int] = {}  # what others noted last, by number
        self._said = False  # that this worker is in
        self._complete_at = 0  # the position of the news at which all were in
        self._in = threading.Event()
        self._failure: RpcError | None = None
        self._awaiting_until = 0.0
        self._patient_until = time.monotonic() + _COME_BACK_WITHIN
        self._impatient_at = time.monotonic() + _IMPATIENT_AFTER
        self._pause = _PAUSES[0]
        self._stop = False
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name=f"zrpc-{self._card.name}-news", daemon=True
        )
        agent.membership.starts = dict(roster.starts)
        for card, why in roster.departed.values():
            self._know_of_departed(card, why)
        for number, card in roster.members.items():
            if number == self._card.number:
                continue
            agent.introduce(card, endpoint_of(agent.membership, card))
            if number in roster.admitted:
                agent.admit(number)
        agent.tickers.append(self._tick)

    def start(self) -> None:
        """Begins to read the news; to be called when the agent serves."""
        self._thread.start()

    def await_admission(self, deadline: float, timeout: float) -> None:
        """Waits until this worker is in, and in a mesh of a fixed size all are.

        Args:
            deadline: on the clock of ``time.monotonic``.
            timeout: what the deadline came from, in seconds, for the error.

        Raises:
            RendezvousError: it took longer; the store failed.
            AuthenticationError: a member does not trust this worker.
        """
        if not self._in.wait(max(0.0, deadline - time.monotonic())):
            raise RendezvousError(self._not_in(timeout))
        if self._failure is not None:
            raise self._failure

    def _not_in(self, timeout: float) -> str:
        size, missing = self._card.world_size, self._roster.missing
        if size and missing:
            return (
                f"expected {size} workers within {timeout:g} s, but ranks {missing} are missing: "
                "start them, or check RANK and WORLD_SIZE"
            )
        return (
            f"expected all members of the mesh to know worker {self._card.name} within {timeout:g} "
            f"s, but some did not answer. The members are {self._others()}"
        )

    def _others(self) -> list[WorkerInfo]:
        members = list(self._roster.members.items())
        return [card.info for number, card in members if number != self._card.number]

    # -- the layer, in the I/O thread ----------------------------------------------------

    def lose(self, rank: int) -> None:
        """A peer is gone."""
        reason = self.agent.reason_gone(rank)
        self._leaving.pop(rank, None)
        self.agent.joined.forget(rank)
        if reason not in (Reason.SILENT, Reason.GAVE_UP):
            self.agent.shut_out(rank)
        if reason is Reason.ENDED:
            self._losses.append((rank, Departure.ENDED, ""))
            self._wake.set()

    def quiet(self) -> bool:
        """The news are nobody's request."""
        return True

    def close(self) -> None:
        """Says farewell, and ends the thread."""
        self._stop = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _FAREWELL)
        del self._news  # the store ends with its last user, where this worker hosts it

    def _know_of_departed(self, card: Card, why: Departure) -> None:
        """Others may still pass on references that it owned."""
        self.agent.introduce(card, "")
        self.agent.part(card.number, _REASONS[why])

    def _tick(self) -> None:
        now = time.monotonic()
        for number in [n for n, until in self._leaving.items() if now > until]:
            self.agent.part(number, Reason.LEFT)

    def _carry_out(self, changes: list[tuple[Change, str]]) -> None:
        for change, endpoint in changes:
            number = change.card.number
            if number == self._card.number:
                continue
            if change.what is What.INTRODUCED:
                self.agent.introduce(change.card, endpoint)
            elif change.what is What.ADMITTED:
                self.agent.admit(number)
            elif change.why is Departure.LEFT and self.agent.has_heard(number):
                # It says so itself, when the last of what it has sent is in.
                self._leaving[number] = time.monotonic() + _LAST_WORDS
            else:
                assert change.why is not None
                self.agent.part(number, _REASONS[change.why])

    # -- the thread of the news ----------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stop:
                self._look()
                self._wake.wait(self._next_pause())
                self._wake.clear()
            self._say_farewell()
        except (RuntimeError, OSError) as error:
            self._lose_store(error)
        except Exception as error:  # nobody is to wait for this thread
            logger.exception("%s reads no more news", self._card.info)
            self._fail(RendezvousError(f"the news of the mesh can't be read: {error}"))

    def _next_pause(self) -> float:
        if not self._in.is_set():
            self._pause = min(2 * self._pause, _PAUSES[1])
            return self._pause
        waiting = self.agent.membership.awaited and time.monotonic() < self._awaiting_until
        return _EVERY_WHEN_AWAITING if waiting else _EVERY

    def _look(self) -> None:
        """Reads what is new, and says what there is to say."""
        items = self._news.read()
        changes = [change for item in items for change in self._roster.read(item)]
        skipped = any(isinstance(item, Summary) for item in items)
        if (changes or skipped) and not self._apply(changes, skipped):
            return  # we close
        if not self._tell_of_losses():
            return  # not before the news are read again
        member = self._card.number in self._roster.members
        if self._noted != self._roster.position:
            self._noted = self._roster.position
            if member:
                self._news.note(self._token, self._noted)
            else:
                self._news.withdraw(self._token)
        if not self._in.is_set() and member:
            self._come_in()
        if items and member:
            self._news.shorten(self._roster, self._line())

    def _tell_of_losses(self) -> bool:
        """Says who is gone; False where that is to be tried again."""
        while self._losses:
            number, why, text = self._losses[0]
            card = self._roster.members.get(number)
            gone = None if card is None else Item(Verb.GONE, card.token, why=why, text=text)
            if gone is not None and not self._news.post(gone):
                return False
            self._losses.popleft()
        return True

    def _line(self) -> int:
        """How many members come before this one, where something is to be done by any."""
        lost = self.agent.membership.lost
        return sum(n < self._card.number and n not in lost for n in self._roster.members)

    def _apply(self, changes: list[Change], skipped: bool) -> bool:
        """Has the agent's I/O thread carry out changes, and waits for that.

        Args:
            changes: what the news have changed.
            skipped: whether there were workers that came and went, of which they say no more.
        """
        starts = dict(self._roster.starts) if skipped else None
        to_do: list[tuple[Change, str]] = []
        for change in changes:
            endpoint = ""
            if change.card.number == self._card.number:
                self._hear_of_oneself(change)
            elif change.what is What.INTRODUCED:
                self._awaiting_until = time.monotonic() + _AWAIT
                endpoint = self._endpoint_of(change.card)
            to_do.append((change, endpoint))
        done = threading.Event()

        def errand() -> None:
            try:
                self._carry_out(to_do)
                if starts is not None:
                    self.agent.membership.starts = starts
            finally:
                done.set()

        self.agent.in_io_thread(errand)
        while not done.wait(_EVERY):
            if self._stop:
                return False
        return True

    def _endpoint_of(self, card: Card) -> str:
        """Where a worker is to be reached that is about to come; empty where it is refused."""
        try:
            return endpoint_of(self.agent.membership, card)
        except RpcError as error:
            if self._card.number not in self._roster.admitted:
                self._fail(error)  # who comes has to fit
                return ""
            logger.warning("%s refuses %s: %s", self._card.info, card.info, error)
            self._losses.append((card.number, Departure.REFUSED, str(error)))
            return ""

    def _hear_of_oneself(self, change: Change) -> None:
        if change.what is not What.LOST or self._stop:
            return
        text = change.text or f"others say: {_REASONS[change.why or Departure.ENDED].value}"
        trouble = f"{self._card.info} is no member of its mesh any more: {text}"
        refused = change.why is Departure.REFUSED
        self._fail(AuthenticationError(trouble) if refused else RendezvousError(trouble))
        logger.error(trouble)

    def _come_in(self) -> None:
        """Says that this worker is in once all others know it, and waits for all to have heard."""
        if not self._said:
            if self._all_have_read(self._roster.joined(self._token)):
                self._said = self._news.post(Item(Verb.IN, self._token))
                self._pause = _PAUSES[0]
        elif self._card.number in self._roster.admitted and not self._roster.missing:
            self._complete_at = self._complete_at or self._roster.position
            if self._all_have_read(self._complete_at):
                self.agent.expect(())
                self._in.set()
        elif time.monotonic() > self._patient_until:
            self._give_up_deserters()

    def _give_up_deserters(self) -> None:
        """Ends the wait for those who were done before this worker came back."""
        deserters = self._roster.deserters(self._card)
        if deserters:
            self._fail(
                RendezvousError(
                    f"the mesh of {self._card.info} has ended while it was started again: "
                    f"{deserters} have shut down and left it"
                )
            )

    def _all_have_read(self, position: int) -> bool:
        """Whether all others have read so many items, those that are lost apart."""
        lost = self.agent.membership.lost
        impatient = time.monotonic() > self._impatient_at
        late: list[int] = []
        for number, card in self._roster.members.items():
            if number == self._card.number or number in lost:
                continue
            if self._have_read.get(number, 0) < position:
                self._have_read[number] = self._news.noted(card.token)
            if self._have_read[number] < position:
                late.append(number)
                if not impatient:
                    break  # the others can be asked when this one has read it
        if late and impatient:
            self.agent.expect(late)  # do they live?
        return not late

    def _fail(self, error: RpcError) -> None:
        if not self._in.is_set():
            self._failure = error
            self._in.set()

    def _say_farewell(self) -> None:
        if self._card.number not in self._roster.members:
            return
        while not self._news.post(Item(Verb.GONE, self._token, why=Departure.LEFT)):
            _catch_up(self._news, self._roster)
            if self._card.number not in self._roster.members:
                return
        if not self.agent.has_terminated:
            return
        # All leave together. Who comes back at once is not to find who is about to leave.
        deadline, pause = time.monotonic() + _FAREWELL, _PAUSES[0]
        lost = self.agent.membership.lost
        while self._roster.members.keys() - lost and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
            _catch_up(self._news, self._roster)

    def _lose_store(self, error: Exception) -> None:
        trouble = f"the store of the mesh fails: {error}"
        self._fail(RendezvousError(trouble))
        if not self._stop:
            logger.warning(
                "%s: %s. The mesh goes on, but no worker can join it any more; `zrpc launch "
                "--elastic` hosts a store for as long as a worker of that launch runs",
                self._card.info,
                trouble,
            )
