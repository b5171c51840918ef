"""The log of a mesh, in any kind of store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.stores import STORES, opener
from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.secret import ClusterSecret, new_secret
from zrpc.membership.signed_store import SignedStore, take_ranks
from zrpc.services.elastic.compaction import LogBounds
from zrpc.services.elastic.limits import DEFAULT_LIMITS
from zrpc.services.elastic.log import MembershipLog
from zrpc.services.elastic.state import MembershipEvent, MembershipState, Verb
from zrpc.wire.member_id import RANKS

SECRET = ClusterSecret(new_secret())


@pytest.fixture(params=STORES)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], dist.Store]:
    return opener(request.param, tmp_path)


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def log_in(store: dist.Store, secret: ClusterSecret | None = SECRET) -> MembershipLog:
    return MembershipLog(SignedStore(store, secret))


def event(token: object) -> MembershipEvent:
    return MembershipEvent(Verb.IN, str(token))


def test_all_use_one_log_in_any_store(open_store: Callable[[], dist.Store]) -> None:
    one, other, *rest = (log_in(open_store()) for _ in range(4))
    one.append(event("a"))
    other.append(event("b"))
    assert one.read() == [event("a"), event("b")]
    assert one.read() == []
    other.note_position("x", 3)
    other.note_position("x", 4)
    assert other.noted_position("x") == 4  # TCPStore does not wait until what it sends has come in
    assert [one.noted_position("x"), one.noted_position("y")] == [4, 0]
    one.withdraw_position("x")
    assert other.noted_position("x") == 0
    assert take_ranks(SignedStore(open_store(), None), 3) == 0
    assert [log.next_rank() for log in rest] == [3, 4]

    def write(number: int) -> None:
        for i in range(10):
            rest[number].append(event(f"{number}.{i}"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    found = other.read()
    assert found[:2] == [event("a"), event("b")]
    tokens = sorted(each.token for each in found[2:])
    assert tokens == sorted(f"{n}.{i}" for n in range(2) for i in range(10))
    assert one.read() == found[2:]
    assert [log.read() for log in (*rest, log_in(open_store()))] == [found] * 3


def test_a_forged_event_is_skipped(store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    """Unsigned, at another place, or of an earlier mesh: both are signed too."""
    earlier = dist.HashStore()
    log_in(earlier).append(event("old"))
    log, other = log_in(store), log_in(store)
    log.append(event("true"))
    raw = dist.PrefixStore("zrpc", store)
    mesh, before = (SignedStore(each, SECRET).get("mesh") for each in (store, earlier))
    raw.set(f"log/{mesh}/1", "- " + event("forged").dump())
    raw.set(f"log/{mesh}/2", raw.get(f"log/{mesh}/0"))
    raw.set(f"log/{mesh}/3", dist.PrefixStore("zrpc", earlier).get(f"log/{before}/0"))
    assert other.read() == [event("true"), None, None, None]
    assert caplog.text.count("an event of the mesh's log is refused") == 3
    assert "is not signed" in caplog.text
    assert caplog.text.count("signed with another cluster secret, or forged") == 2


# -- compaction --------------------------------------------------------------------------------


class Reader:
    """A worker that reads the log, and knows the state."""

    def __init__(self, store: dist.Store) -> None:
        self.log, self.state = log_in(store), MembershipState()

    def read(self) -> str:
        """Reads on, and returns the state as text."""
        self.log.catch_up(self.state)
        return self.state.dump()

    def see(self, *numbers: int) -> None:
        """Appends that workers have joined and left."""
        for number in numbers:
            record = PeerRecord(f"w{number}", number, 0, f"{number:032x}", "", "", "")
            self.log.note_position(record.token, 0)
            for verb, fields in (
                (Verb.JOIN, {"record": record}),
                (Verb.GONE, {"why": Reason.LEFT}),
            ):
                assert self.log.append(MembershipEvent(verb, record.token, **fields))
                self.read()
                self.log.compact(self.state, 0)


@pytest.mark.system
def test_old_events_are_deleted_in_any_store(open_store: Callable[[], dist.Store]) -> None:
    store = open_store()
    steady, frozen = Reader(store), Reader(open_store())
    steady.see(*range(11))
    frozen.read()
    steady.see(*range(11, 100))
    assert store.num_keys() < 3 * 40 + 10
    late = log_in(open_store())
    [snapshot, *rest] = late.read()
    assert isinstance(snapshot, MembershipState)
    assert len(rest) < 40
    for _ in range(5):  # it checks only now and then whether its place is still there
        frozen.read()
    assert frozen.read() == steady.read() == Reader(open_store()).read()
    assert frozen.log.append(event("a"))
    assert [log.read() for log in (late, steady.log)] == [[event("a")]] * 2


@pytest.mark.parametrize("what", ["bounds", "snapshot"])
def test_bounds_or_a_snapshot_that_cant_be_read(store: dist.Store, what: str) -> None:
    Reader(store).see(*range(20))
    entries = SignedStore(store, SECRET)
    key = f"{what}/{entries.get('mesh')}" + ("/1" if what == "snapshot" else "")
    entries.set(key, "[]")
    with pytest.raises(RendezvousError, match=r"expected (the bounds of a mesh's log|a snapshot)"):
        log_in(store).read()
    dist.PrefixStore("zrpc", store).set(key, "- [1]")
    with pytest.raises(AuthenticationError, match="is not signed"):
        log_in(store).read()
    entries.delete(f"snapshot/{entries.get('mesh')}/1")
    if what == "snapshot":
        with pytest.raises(RendezvousError, match="something else has deleted it"):
            log_in(store).read()


def test_a_forged_snapshot_stops_compaction(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    reader, mesh = Reader(store), SignedStore(store, SECRET).get("mesh")
    dist.PrefixStore("zrpc", store).set(f"snapshot/{mesh}/1", "- forged")
    reader.see(*range(40))
    assert caplog.text.count("the mesh's log is not compacted: the entry") == 1
    assert Reader(store).read() == reader.read()


def test_old_bounds_are_ignored(store: dist.Store) -> None:
    """As when somebody who can write to the store repeats it."""
    reader, mesh = Reader(store), SignedStore(store, SECRET).get("mesh")
    raw, key = dist.PrefixStore("zrpc", store), f"bounds/{mesh}"
    reader.see(*range(20))
    old = raw.get(key)
    reader.see(*range(20, 80))
    raw.set(key, old)
    assert reader.log.append(event("a"))
    assert reader.log.read() == [event("a")]
    with pytest.raises(RendezvousError, match="found none"):
        log_in(store).read()


def test_ranks_start_over_when_all_were_given(store: dist.Store) -> None:
    entries = SignedStore(store, SECRET)
    assert take_ranks(entries, RANKS - 3) == 0
    assert log_in(store).next_rank() == RANKS - 3
    assert take_ranks(entries, 4) == 2  # one after the other
    assert log_in(store).next_rank() == 6


def test_deletion_lags_two_snapshots_behind() -> None:
    bounds = LogBounds()
    seen = []
    for base in (40, 90, 150, 200):
        seen.append(list(bounds.dead))
        bounds = bounds.moved(base)
    assert bounds == LogBounds(4, 90, 150, 200)
    assert seen == [[], [], list(range(40)), list(range(40, 90))]


def test_which_member_writes_a_snapshot_and_when() -> None:
    bounds = LogBounds(1, 0, 0, 100)
    assert [line for line in range(4) if bounds.due(137, 2, line, DEFAULT_LIMITS)] == [0, 1]
    assert not bounds.due(137, 10, 0, DEFAULT_LIMITS)  # the more members, the longer


def test_bounds_as_text() -> None:
    bounds = LogBounds(3, 10, 20, 20)
    assert LogBounds.parse(bounds.dump()) == bounds
    for text in (
        *("", "[]", "1", "{}", "[" * 10_000, "[1, 0, 0]", "[1, 0, 0, 1.5]", "[1, 0, 0, true]"),
        *("[0, 0, 0, 0]", "[1, 2, 1, 3]", "[1, -1, 1, 3]"),
    ):
        with pytest.raises(ValueError, match="expected the bounds"):
            LogBounds.parse(text)
