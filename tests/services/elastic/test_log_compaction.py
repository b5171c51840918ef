"""Old events are deleted, even if workers die, are frozen, or compact the log at once."""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.errors import RendezvousError
from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.signed_store import SignedStore
from zrpc.services.elastic.compaction import LogBounds
from zrpc.services.elastic.join import claim
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.services.elastic.log import MembershipLog
from zrpc.services.elastic.state import MembershipEvent, MembershipState, Verb

TIMEOUT_SECONDS = 20.0
# A snapshot every few events, so that there are many of them.
LIMITS = ElasticLimits(snapshot_events=3, snapshot_events_per_member=0)
# The id of the mesh, the count of ranks, the bounds, two snapshots, notes of workers that have
# just left.
MAX_SURPLUS = 8


class Killed(BaseException):
    """Ends a worker in the middle of an operation."""


class Steps:
    """A store that a worker uses one operation at a time, when the test lets it."""

    def __init__(self, worker: Worker, store: dist.Store) -> None:
        self._worker = worker
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def operation(*arguments: Any) -> Any:
            self._worker.await_turn()
            if name == "compare_set" and "log/" in arguments[0] and arguments[1] == "":
                return self._worker.world.append(method, arguments)
            return method(*arguments)

        return operation


class World:
    """All events that were appended, and the state after each of them."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.names = map("w{}".format, itertools.count())
        self.gone = set()  # tokens of workers that are reported to have ended
        self.events = []
        self.known = [MembershipState().dump()]
        self._state = MembershipState()

    def append(self, compare_set: Callable[..., bytes], arguments: tuple[Any, ...]) -> bytes:
        key, _, entry = arguments
        missing = not dist.PrefixStore("zrpc", self.store).check([key])
        found = compare_set(*arguments)
        place = int(key.rpartition("/")[2])
        if missing:
            assert place <= len(self.events), "there is a gap"
        if missing and place == len(self.events):  # else another one was deleted there
            self.events.append(MembershipEvent.parse(entry.partition(" ")[2]))
            self._state.apply(self.events[-1])
            self.known.append(self._state.dump())
        return found

    def check(self, state: MembershipState) -> None:
        assert state.dump() == self.known[state.position]

    def bounds(self) -> LogBounds:
        entries = SignedStore(self.store, None)
        key = f"bounds/{entries.get('mesh')}"
        return LogBounds.parse(entries.get(key)) if entries.check([key]) else LogBounds()

    def surplus(self) -> int:
        """Counts the entries that are neither events nor notes of members."""
        events = len(self.events) - self.bounds().swept
        return self.store.num_keys() - events - len(self._state.members)

    def snapshots(self) -> list[int]:
        entries, last = SignedStore(self.store, None), self.bounds().generation + 1
        keys = [f"snapshot/{entries.get('mesh')}/{number}" for number in range(last + 1)]
        return [last - number for number, key in enumerate(keys) if entries.check([key])]

    def write_to_deleted_places(self) -> None:
        """Writes to all places that were deleted, as writers that were frozen may do."""
        entries = SignedStore(self.store, None)
        first = MembershipState.parse(self.known[1])
        [member, *_] = [*self._state.members.values(), *first.members.values()]
        lie = MembershipEvent(Verb.GONE, member.token, why=Reason.ENDED).dump()
        for place in range(self.bounds().floor):
            entries.claim(f"log/{entries.get('mesh')}/{place}", lie)


class Worker(threading.Thread):
    """Joins a mesh, reads the log, and leaves, several times, as `ElasticMembership` does."""

    def __init__(self, world: World, lives: int) -> None:
        super().__init__(daemon=True)
        self.world = world
        self.lives = lives
        self.killed = False
        self.ended = False
        self.token = ""
        self.error = None
        # How many operations it may still begin before it waits for its next turn, plus one.
        self._left = 1.0
        self._turn = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self.start()
        assert self._done.acquire(timeout=TIMEOUT_SECONDS)

    def await_turn(self) -> None:
        self._left -= 1
        if self._left > 0:
            return
        self._done.release()
        assert self._turn.acquire(timeout=TIMEOUT_SECONDS)
        if self.killed:
            raise Killed

    def step(self, times: float = 1) -> None:
        """Lets it do the next operations on the store, while nobody else does any."""
        if times and not self.ended:
            self._left = times
            self._turn.release()
            assert self._done.acquire(timeout=TIMEOUT_SECONDS)
            if self.error is not None:
                raise self.error

    def go_on(self) -> None:
        self.step(math.inf)
        assert self.ended

    def kill(self) -> None:
        self.killed = True
        self.step()
        self.join(TIMEOUT_SECONDS)
        assert not self.is_alive()

    def run(self) -> None:
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

    def live(self) -> None:
        entries = SignedStore(self.world.store, None)
        entries._store = Steps(self, entries._store)
        self.token = secrets.token_hex(16)
        self.log, self.state = MembershipLog(entries), MembershipState(LIMITS)
        name = next(self.world.names)
        record = PeerRecord(name, -1, 0, self.token, "", "", "")
        try:
            mine = claim(self.log, self.state, record, time.monotonic() + TIMEOUT_SECONDS)
        except RendezvousError as error:
            if "was suspended while it asked to join" not in str(error):
                raise
            assert self.state.member_of(self.token) is None
            return
        self.number = mine.member_id
        self.world.check(self.state)
        said = False
        for _ in range(4):
            if not self.follow():
                return
            said = said or self.append(MembershipEvent(Verb.IN, self.token))
        while not self.append(MembershipEvent(Verb.GONE, self.token, why=Reason.LEFT)):
            if not self.follow():
                return

    def append(self, event: MembershipEvent) -> bool:
        certain = self.log.append(event)
        assert event in self.world.events or not certain
        return certain

    def follow(self) -> bool:
        """Reads what is new; returns False if this worker is gone."""
        for event in self.log.read():
            self.state.apply(event)
        self.world.check(self.state)
        for record in list(self.state.members.values()):
            if record.token in self.world.gone:
                self.append(MembershipEvent(Verb.GONE, record.token, why=Reason.ENDED))
        if self.number not in self.state.members:
            self.log.withdraw_position(self.token)
            return False
        self.log.note_position(self.token, self.state.position)
        self.log.compact(self.state, 0)
        return True


workers = st.integers(0, 3)
moves = st.one_of(
    *[st.tuples(st.just("step"), workers, st.integers(1, 12))] * 8,
    *[st.tuples(st.just("go on"), workers, st.integers(60, 200))] * 2,
    st.tuples(st.just("kill"), workers, st.just(0)),
    st.tuples(st.just("declare gone"), workers, st.just(0)),  # while it lives
)


@pytest.mark.system
@given(st.lists(moves, min_size=10, max_size=60))
@settings(max_examples=30)
def test_all_workers_agree_whatever_happens_in_between(moves: list[tuple[str, int, int]]) -> None:
    world = World()
    crew = [Worker(world, 4) for _ in range(4)]
    killed = 0
    try:
        for kind, index, count in moves:
            if kind in ("kill", "declare gone"):
                world.gone.add(crew[index].token)
            if kind == "kill" and not crew[index].ended:
                crew[index].kill()
                killed += 1
                crew[index] = Worker(world, 4)
            crew[index].step(count)
        while not all(worker.ended for worker in crew):
            for worker in crew:
                worker.step()
        crew.append(Worker(world, 6))  # it finds what the others have left
        crew[-1].go_on()
    finally:
        for worker in crew:
            worker.kill()
    # Entries of a worker that was frozen and then killed can't be found again.
    assert world.surplus() <= MAX_SURPLUS + killed


@pytest.mark.system
@pytest.mark.parametrize("write_to_deleted_places", [False, True])
@pytest.mark.parametrize("lives", [2, 5])
def test_a_worker_frozen_at_any_step_recovers(lives: int, write_to_deleted_places: bool) -> None:
    step = 0
    while True:
        world = World()
        Worker(world, 2).go_on()
        frozen = Worker(world, 1)
        frozen.step(step)
        if frozen.ended:
            break
        Worker(world, lives).go_on()
        if write_to_deleted_places:
            world.write_to_deleted_places()
        frozen.go_on()
        if not write_to_deleted_places:
            assert world.surplus() <= MAX_SURPLUS
            assert set(world.snapshots()) <= {1, 2}  # the last but one, and the last
        Worker(world, 1).go_on()
        step += 1
    assert step > 30
