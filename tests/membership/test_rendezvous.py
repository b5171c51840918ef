"""How workers find each other, over each kind of store."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.records import peer_record
from tests.support.stores import STORES, RecordingStore, opener
from tests.support.threads import assert_raised, start_all
from tests.support.waiting import SOON, pending, until
from zrpc.errors import AuthenticationError, OptionError, RendezvousError
from zrpc.membership.attendance import Arrival
from zrpc.membership.peer_record import PeerRecord, own_version
from zrpc.membership.rendezvous import RendezvousTiming, StoreLost, meet
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore

TIMING = RendezvousTiming()
QUICK = RendezvousTiming(look_seconds=0.01, look_seconds_per_rank=0.001)
Connect = Callable[[], dist.Store]
_starts = itertools.count()


def record(rank: int, world_size: int, **changes: Any) -> PeerRecord:
    """Returns the record of a worker's new start."""
    return peer_record(rank, world_size, start=next(_starts), **changes)


every_store = pytest.mark.parametrize("connect", STORES, indirect=True)


@pytest.fixture
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Returns a function that gives a worker its own connection to the store."""
    return opener(getattr(request, "param", "hash"), tmp_path)


def start(
    connect: Connect,
    records: list[PeerRecord],
    timeout: float = SOON,
    timing: RendezvousTiming = TIMING,
    **options: Any,
) -> Callable[[], list[Any]]:
    """Starts to meet; returns a function that returns the records found, or the errors."""
    calls = [partial(meet, connect(), mine, timeout, timing=timing, **options) for mine in records]
    return start_all(calls, 2 * SOON)


@every_store
def test_all_see_the_same_records_and_where_each_listens(connect: Connect) -> None:
    """The store outlives a mesh, as torchrun's does: the next one does not use its records."""
    for size in (1, 7, 3, 2):
        records = [record(rank, size) for rank in range(size)]
        early = start(connect, records[1:-1], listen=lambda found: f"not 0 of {len(found)}")
        found = start(connect, records[:1], listen=lambda found: f"0 of {len(found)}")
        late = start(connect, records[1:][-1:], listen=lambda found: f"not 0 of {len(found)}")
        listening = [
            replace(each, endpoint=f"{'not ' * bool(each.rank)}0 of {size}") for each in records
        ]
        assert found() + early() + late() == [listening] * size


def write_roster(entries: SignedStore, records: list[PeerRecord]) -> None:
    roster = json.dumps(["roster", *(each.dump() for each in records)])
    entries.set(f"roster/{records[0].token}/0", roster)


def await_answer(entries: SignedStore, leader: PeerRecord, rank: int) -> None:
    """Waits until a worker has answered the first roster."""
    key = f"record/{leader.token}/{rank}"
    until(lambda: Arrival.parse(entries.get(key)).answers == 0)


@pytest.mark.parametrize(("size", "rosters"), [(3, 1), (2, 0), (3, 0)])
def test_a_host_of_the_store_that_exits_first(size: int, rosters: int) -> None:
    """It is played, as are all others but rank 1. It may be that of an earlier mesh of three."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    entries, records = SignedStore(host, None), [record(rank, 3) for rank in range(3)]
    own = records[1] if rosters else record(1, size)
    entries.set("leader", records[0].dump())
    outcome = start(lambda: client, [own], 3 * SOON)
    entries.get(f"record/{records[0].token}/1")  # waits for it
    if rosters:
        write_roster(entries, records)
        await_answer(entries, records[0], 1)
    begun = time.monotonic()
    del entries, host
    [error] = outcome()
    assert time.monotonic() - begun < SOON
    assert type(error) is (RendezvousError if rosters else StoreLost)
    if rosters:
        assert f"which is {records[0].info}, or the launcher" in str(error)
    if size == 2:  # the sizes explain more than the loss of the store does
        assert "expects a world of 3 workers, but worker" in str(error)
        assert "one of 2; then the store was lost" in str(error)


def test_the_ranks_that_are_missing_are_told_to_workers_that_would_wait_for_longer() -> None:
    """The host's time has run out before that of the others."""
    hosts = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    client = dist.TCPStore("127.0.0.1", hosts[0].port, is_master=False)
    late = start(lambda: client, [record(1, 4)])
    [first] = start(hosts.pop, [record(0, 4)], timeout=0.5)()
    missing = "within 0.5 s, but ranks 2-3 are missing: start them"
    assert_raised([first, *late()], RendezvousError, missing)


@pytest.mark.system
@every_store
def test_missing_ranks_are_named_at_the_deadline(connect: Connect) -> None:
    for error in start(connect, [record(0, 4), record(2, 4)], timeout=1.0)():
        assert isinstance(error, RendezvousError)
        assert re.search(
            r"expected 4 workers( at 127.0.0.1:\d+)? within 1 s, but ranks 1, 3 are missing: "
            r"start them, or check RANK and WORLD_SIZE.*ZRPC_INIT_TIMEOUT.*; hosts .*: "
            r"node0 \(0, 2\)$",
            str(error),
        )
    [error] = start(connect, [record(1, 4)], timeout=0.0)()
    assert "within 0 s" in str(error)


@pytest.mark.system
def test_workers_that_left_again_or_are_from_an_earlier_run_are_named(connect: Connect) -> None:
    first = record(0, 3, name="old")
    waiting = start(connect, [first], timeout=1.0)
    start(connect, [record(1, 3, name="gone")], timeout=0.1)()
    SignedStore(connect(), None).set(f"record/{first.token}/2", Arrival(record(2, 3)).dump())
    errors = waiting() + start(connect, [record(1, 3)], timeout=0.2)()
    for error, who in zip(errors, ("id=1, name=gone", "id=0, name=old"), strict=True):
        assert isinstance(error, RendezvousError)
        assert f"WorkerInfo({who})" in str(error)
        assert "left again, do not answer, or are from an earlier run" in str(error)


@pytest.mark.system
@pytest.mark.parametrize("secret", [None, ClusterSecret("b" * 32)])
def test_a_store_of_another_mesh_is_named(secret: ClusterSecret | None) -> None:
    """Rank 0 finds the port in use; the others connect to what they take for its store."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start(lambda: host, [record(0, 2), record(1, 2)])()
    with pytest.raises((RendezvousError, AuthenticationError)) as info:
        meet(host, record(1, 2), 0.3, secret)
    assert f"expected 2 workers at 127.0.0.1:{host.port} within 0.3 s" in str(info.value)
    assert "is that of another mesh: give each mesh a MASTER_PORT of its own" in str(info.value)


def refuse(_: list[PeerRecord]) -> Any:
    raise AuthenticationError("these can't form a mesh")


def refuse_options(_: object) -> Any:
    raise OptionError("expected other options")


@every_store
def test_why_workers_can_not_form_a_mesh_is_told_to_all(connect: Connect) -> None:
    same = [record(0, 2, name="same"), record(1, 2, name="same")]
    text = "worker name same is not unique: ranks 0 and 1 both have it"
    assert_raised(start(connect, same)(), RendezvousError, text)
    for hook in ("listen", "check"):
        errors = start(connect, [record(0, 2), record(1, 2)], **{hook: refuse})()
        assert_raised(errors, AuthenticationError, "these can't form a mesh")
    errors = start(connect, [record(0, 2), record(1, 2)], check=refuse_options)()
    assert_raised(errors, OptionError)


def test_a_worker_listens_again_for_a_record_that_was_replaced(connect: Connect) -> None:
    """One that has come before all others were there, and was killed."""
    first, killed, second = record(0, 2), record(1, 2), record(1, 2)
    SignedStore(connect(), None).set(f"record/{first.token}/1", Arrival(killed).dump())
    seen: list[PeerRecord] = []

    def listen(records: list[PeerRecord]) -> str:
        seen.append(records[1])
        return refuse(records) if records[1] == killed else "here"

    waiting = start(connect, [first], listen=listen, timing=QUICK)
    until(lambda: seen)
    assert start(connect, [second])() == waiting()
    assert seen == [killed, second]


@pytest.mark.parametrize("confirms", [False, True])
def test_no_worker_joins_without_one_that_gives_up_once_all_have_come(
    connect: Connect, confirms: bool
) -> None:
    """Another in its place is met."""
    entries, first, left = SignedStore(connect(), None), record(0, 3), record(1, 3)
    key, token = f"record/{first.token}/1", first.token
    entries.set(key, Arrival(left).dump())
    waiting = start(connect, [first, record(2, 3)], timing=QUICK)
    entries.get(f"roster/{token}/0")
    if confirms:
        assert entries.claim(f"roster/{token}/1", '["abandoned"]')
        entries.set(key, Arrival(left, answers=0).dump())
    entries.set(key, Arrival(left, left=True).dump())
    second = record(1, 3)
    [met] = start(connect, [second], timing=QUICK)()
    assert met[1] == second
    assert waiting() == [met] * 2


@pytest.mark.system
@pytest.mark.parametrize("hook", ["check", "listen"])
@pytest.mark.parametrize("lives", [True, False])
def test_rank_0_stays_until_those_that_live_have_read_why(
    connect: Connect, hook: str, lives: bool
) -> None:
    # It might close the store, and the others would report a lost connection.
    timing = TIMING if lives else RendezvousTiming(failure_read_seconds=0.1)
    entries, first, second = SignedStore(connect(), None), record(0, 2), record(1, 2)
    finish = start(connect, [first], timing=timing, **{hook: refuse})
    entries.set(f"record/{first.token}/1", Arrival(second).dump())
    entries.get(f"roster/{first.token}/0")  # waits for it
    entries.set(f"record/{first.token}/1", Arrival(second, answers=0).dump())
    until(lambda: entries.check([f"roster/{first.token}/1"]))  # rank 0 knows
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(finish)
        if lives:
            assert pending(outcome, 0.2)
            entries.set(f"heard/{first.token}/1", "1")
        [error] = outcome.result(SOON)
    assert "these can't form a mesh" in str(error)


def test_rank_0_twice() -> None:
    store = dist.HashStore()
    entries = SignedStore(store, None)
    first, second = record(0, 2, name="first"), record(0, 2, name="second")
    outcome = start(lambda: store, [first], timing=QUICK)
    until(lambda: entries.check(["leader"]))
    others = start(lambda: store, [second])
    until(lambda: entries.get("leader") == second.dump())
    last = start(lambda: store, [record(1, 2)])
    [error] = outcome()
    assert isinstance(error, RendezvousError)
    places = r"first \(pid 0 on node0\) and second \(pid 0 on node0\) both have it"
    assert re.search(rf"rank 0 is not unique: workers {places}", str(error))
    assert others() == last()


@pytest.mark.system
def test_all_are_told_which_rank_came_twice_and_from_where(connect: Connect) -> None:
    entries = SignedStore(connect(), None)
    host, first = record(0, 3), record(1, 3, name="first", pid=11, host="a")
    second = record(1, 3, name="second", pid=12, host="b")
    outcomes = start(connect, [host, first], timeout=3.0)
    until(lambda: entries.check([f"record/{host.token}/1"]))
    more = start(connect, [second], timeout=3.0)
    told = (
        "but rank 1 came twice, from first (pid 11 on a) and second (pid 12 on b), and rank 2 "
        "is missing: start them, or check RANK and WORLD_SIZE"
    )
    assert_raised([*outcomes(), *more()], RendezvousError, told)
    # In the next run there is one of each.
    again = start(connect, [record(0, 3), record(1, 3)], timeout=0.3)
    assert_raised(again(), RendezvousError, "but rank 2 is missing")


def test_worker_that_is_started_in_the_place_of_another_is_met(connect: Connect) -> None:
    entries = SignedStore(connect(), None)
    replaced, host = record(1, 3, name="replaced"), record(0, 3)
    waiting = start(connect, [host, replaced])
    key = f"record/{host.token}/1"
    until(lambda: entries.check([key]))
    others = [record(1, 3), record(2, 3)]
    first = start(connect, others[:1])
    until(lambda: Arrival.parse(entries.get(key)).record == others[0])
    assert start(connect, others[1:])() == [[host, *others]]
    assert first() == [[host, *others]]
    met, error = waiting()
    assert met == [host, *others]
    places = "replaced (pid 0 on node0) and worker1 (pid 0 on node0)"
    assert f"rank 1 is not unique: workers {places} both have it" in str(error)


@pytest.mark.system
def test_a_worker_that_waits_for_too_long_when_all_others_have_met(connect: Connect) -> None:
    """All go on, or none: its time is over just when the others have seen that it takes part."""
    entries, records = SignedStore(connect(), None), [record(0, 2), record(1, 2)]
    token = records[0].token
    entries.set("leader", records[0].dump())

    def listen(_: list[PeerRecord]) -> str:
        time.sleep(1.0)
        entries.set(f"roster/{token}/1", '["met", "", "slow"]')
        return "slow"

    late = start(connect, records[1:], timeout=0.5, listen=listen)
    write_roster(entries, records)
    assert late() == [[records[0], replace(records[1], endpoint="slow")]]


@pytest.mark.system
def test_workers_that_expect_different_meshes(connect: Connect) -> None:
    for other, texts in (
        ({"world_size": 3}, ["expects a world of", "one of"]),
        (
            {"world_size": 2, "heartbeat_timeout": 7.5},
            [
                "worker worker1 (rank 1) has heartbeat_timeout=7.5, but worker worker0",
                "(rank 0) 0: give all workers of the mesh the same",
            ],
        ),
    ):
        errors = start(connect, [record(0, 2), record(1, **other)], timeout=0.5)()
        assert_raised(errors, RendezvousError, *texts)


def test_another_version_of_zrpc_is_refused_and_both_are_named(connect: Connect) -> None:
    versions = r"a peer record of zrpc (\S+), which this worker runs, found one of (\S+): install"
    mine = record(0, 2)
    SignedStore(connect(), None).set(
        f"record/{mine.token}/1", Arrival(record(1, 2, version="0.0.9")).dump()
    )
    [error] = start(connect, [mine], timing=RendezvousTiming(failure_read_seconds=0.1))()
    assert isinstance(error, RendezvousError)
    assert re.search(versions, str(error)).groups() == (own_version(), "0.0.9")


def test_a_store_that_fails_is_a_rendezvous_error() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    del host
    with pytest.raises(RendezvousError, match="the store failed while the workers were meeting"):
        meet(client, record(0, 1), 1)


@pytest.mark.parametrize("size", [1, 2, 40])
def test_the_requests_to_the_store_grow_as_the_number_of_workers(size: int) -> None:
    store = RecordingStore()
    records = [record(rank, size) for rank in range(size)]
    slow = RendezvousTiming(look_seconds=2 * SOON)  # no looks: how many depends on the machine
    assert start(lambda: store, records, timing=slow)() == [records] * size
    assert store.requests <= 6 * size


@pytest.mark.system
def test_a_worker_that_waits_for_half_of_256_asks_for_few_keys() -> None:
    """They wait like that for minutes if a host is late, in one store."""
    store, host = RecordingStore(), record(0, 256)
    entries = SignedStore(store, None)
    for rank in range(1, 256, 2):
        entries.set(f"record/{host.token}/{rank}", Arrival(record(rank, 256)).dump())
    with pytest.raises(RendezvousError, match=r"ranks 2, 4, 6, .* are missing"):
        meet(store, host, timeout=1.0)
    # Rank 0 at each of its polls, the others for the error only.
    assert 256 < store.keys_asked < 60 * 256
    waiting = RecordingStore()
    SignedStore(waiting, None).set("leader", host.dump())
    with pytest.raises(RendezvousError, match="are missing"):
        meet(waiting, record(1, 256), timeout=1.0)
    assert waiting.keys_asked < 2 * 256


@pytest.mark.parametrize(("rank", "ended"), [(0, "1"), (1, "0")])
def test_a_worker_stops_waiting_for_others_that_have_ended(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, ended: str
) -> None:
    """It goes on to wait in a mesh of another size than the launcher's."""
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ZRPC_LAUNCHED", json.dumps({"RANK": str(rank), "WORLD_SIZE": "3"}))
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(meet, connect(), record(rank, 3), 60.0)
        of_others = pool.submit(meet, dist.HashStore(), record(rank, 2), 1.0)
        assert pending(waiting, 0.1)
        (tmp_path / "launch-ended").write_text(f"{ended} 7")
        error = f"expected 3 workers, but rank {ended} has ended with exit code 0"
        with pytest.raises(RendezvousError, match=error):
            waiting.result(SOON)
        with pytest.raises(RendezvousError, match="within 1 s"):
            of_others.result(SOON)


def test_a_worker_stops_waiting_for_others_when_the_launcher_stops_all(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(tmp_path))
    note = tmp_path / "launch-stops"
    note.touch()  # it is being written
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, connect(), record(0, 2), 60.0)
        assert pending(waiting, 0.1)
        note.write_text("rank 1 failed (exit code 3)")
        with pytest.raises(
            RendezvousError, match=r"stops all workers: rank 1 failed \(exit code 3"
        ):
            waiting.result(SOON)
