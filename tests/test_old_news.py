"""Old news are forgotten, whoever dies, is frozen, or does the same at the same time."""

from __future__ import annotations

import itertools
import secrets
import threading
import time

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import zrpc.horizon
from zrpc.card import Card
from zrpc.elastic import claim
from zrpc.entries import Entries
from zrpc.errors import RendezvousError
from zrpc.horizon import Horizon
from zrpc.item import Departure, Item, Verb
from zrpc.news import News
from zrpc.roster import Roster

PATIENCE = 20.0
# The id of the mesh, the count of ranks, the horizon, two summaries, notes of who has just left.
FEW = 8


class Killed(BaseException):
    """Ends a worker in the midst of what it does."""


class Steps:
    """A store that a worker uses one operation at a time, each when it is told to."""

    def __init__(self, worker, store):
        self._worker = worker
        self._store = store

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def operation(*arguments):
            self._worker.await_turn()
            if name == "compare_set" and "news/" in arguments[0] and arguments[1] == "":
                return self._worker.world.append(method, arguments)
            return method(*arguments)

        return operation


class World:
    """What really was said: all items, and what who has read so many of them knows."""

    def __init__(self):
        self.store = dist.HashStore()
        self.names = map("w{}".format, itertools.count())
        self.gone = set()  # tokens of those that are said to have ended
        self.items = []
        self.known = [Roster().summary()]
        self._roster = Roster()

    def append(self, compare_set, arguments):
        key, _, entry = arguments
        missing = not dist.PrefixStore("zrpc", self.store).check([key])
        found = compare_set(*arguments)
        place = int(key.rpartition("/")[2])
        if missing:
            assert place <= len(self.items), "there is a gap"
        if missing and place == len(self.items):  # else it is where another one was deleted
            self.items.append(Item.parse(entry.partition(" ")[2]))
            self._roster.read(self.items[-1])
            self.known.append(self._roster.summary())
        return found

    def check(self, roster):
        summary = roster.summary()
        assert summary == self.known[summary.position]

    def horizon(self):
        entries = Entries(self.store, None)
        key = f"horizon/{entries.get('mesh')}"
        return Horizon.parse(entries.get(key)) if entries.check([key]) else Horizon()

    def surplus(self):
        """How many entries there are that are neither items nor notes of members."""
        items = len(self.items) - self.horizon().swept
        return self.store.num_keys() - items - len(self.known[-1].members)

    def summaries(self):
        entries, last = Entries(self.store, None), self.horizon().generation + 1
        keys = [f"summary/{entries.get('mesh')}/{number}" for number in range(last + 1)]
        return [last - number for number, key in enumerate(keys) if entries.check([key])]

    def litter(self):
        """Writes to all places that were deleted, as writers that were frozen may do."""
        entries = Entries(self.store, None)
        [member, *_] = [*self.known[-1].members.values(), *self.known[1].members.values()]
        lie = Item(Verb.GONE, member.token, why=Departure.ENDED).dump()
        for place in range(self.horizon().floor):
            entries.claim(f"news/{entries.get('mesh')}/{place}", lie)


class Worker(threading.Thread):
    """Joins a mesh, looks at the news, and leaves, again and again, as `ElasticLayer` does."""

    def __init__(self, world, lives):
        super().__init__(daemon=True)
        self.world = world
        self.lives = lives
        self.killed = False
        self.ended = False
        self.token = ""
        self.error = None
        self._turn = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self.start()
        assert self._done.acquire(timeout=PATIENCE)

    def await_turn(self):
        self._done.release()
        assert self._turn.acquire(timeout=PATIENCE)
        if self.killed:
            raise Killed

    def step(self):
        """Has it do the next thing to the store."""
        if not self.ended:
            self._turn.release()
            assert self._done.acquire(timeout=PATIENCE)
            if self.error is not None:
                raise self.error

    def go_on(self):
        while not self.ended:
            self.step()

    def kill(self):
        self.killed = True
        self.step()
        self.join(PATIENCE)
        assert not self.is_alive()

    def run(self):
        try:
            self.await_turn()
            for _ in range(self.lives):
                self.live()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._done.release()

    def live(self):
        entries = Entries(self.world.store, None)
        entries._store = Steps(self, entries._store)
        self.token = secrets.token_hex(16)
        self.news, self.roster = News(entries), Roster()
        name = next(self.world.names)
        card = Card(name, -1, 0, self.token, "", "", "")
        try:
            mine = claim(self.news, self.roster, card, time.monotonic() + PATIENCE)
        except RendezvousError as error:
            if "was suspended while it asked to join" not in str(error):
                raise
            assert self.roster.number(self.token) is None
            return
        self.number = mine.number
        self.world.check(self.roster)
        said = False
        for _ in range(4):
            if not self.look():
                return
            said = said or self.say(Item(Verb.IN, self.token))
        while not self.say(Item(Verb.GONE, self.token, why=Departure.LEFT)):
            if not self.look():
                return

    def say(self, item):
        certain = self.news.post(item)
        assert item in self.world.items or not certain
        return certain

    def look(self):
        """Reads what is new; False where it says that this worker is gone."""
        for item in self.news.read():
            self.roster.read(item)
        self.world.check(self.roster)
        for card in list(self.roster.members.values()):
            if card.token in self.world.gone:
                self.say(Item(Verb.GONE, card.token, why=Departure.ENDED))
        if self.number not in self.roster.members:
            self.news.withdraw(self.token)
            return False
        self.news.note(self.token, self.roster.position)
        self.news.shorten(self.roster, 0)
        return True


@pytest.fixture(scope="module", autouse=True)
def short_news():
    """A summary every few items, so that there are many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zrpc.horizon, "_LENGTH", 3)
        patch.setattr(zrpc.horizon, "_LENGTH_PER_MEMBER", 0)
        yield


workers = st.integers(0, 3)
moves = st.one_of(
    *[st.tuples(st.just("step"), workers, st.integers(1, 12))] * 8,
    *[st.tuples(st.just("go on"), workers, st.integers(60, 200))] * 2,
    st.tuples(st.just("kill"), workers, st.just(0)),
    st.tuples(st.just("bury"), workers, st.just(0)),  # while it lives
)


@given(st.lists(moves, min_size=10, max_size=60))
@settings(max_examples=30, deadline=None)
def test_all_know_the_same_whatever_happens_in_between(moves):
    world = World()
    crew = [Worker(world, 4) for _ in range(4)]
    killed = 0
    try:
        for kind, index, count in moves:
            if kind in ("kill", "bury"):
                world.gone.add(crew[index].token)
            if kind == "kill" and not crew[index].ended:
                crew[index].kill()
                killed += 1
                crew[index] = Worker(world, 4)
            for _ in range(count):
                crew[index].step()
        while not all(worker.ended for worker in crew):
            for worker in crew:
                worker.step()
        crew.append(Worker(world, 6))  # it finds what the others have left
        crew[-1].go_on()
    finally:
        for worker in crew:
            worker.kill()
    # What somebody left behind who was frozen and then killed can't be found again.
    assert world.surplus() <= FEW + killed


@pytest.mark.parametrize("litter", [False, True])
@pytest.mark.parametrize("lives", [2, 5])
def test_who_is_frozen_at_any_step_finds_its_way(lives, litter):
    step = 0
    while True:
        world = World()
        Worker(world, 2).go_on()
        frozen = Worker(world, 1)
        for _ in range(step):
            frozen.step()
        if frozen.ended:
            break
        Worker(world, lives).go_on()
        if litter:
            world.litter()
        frozen.go_on()
        if not litter:
            assert world.surplus() <= FEW
            assert set(world.summaries()) <= {1, 2}  # the last but one, and the last
        Worker(world, 1).go_on()
        step += 1
    assert step > 30
