"""How workers find each other, over each kind of store."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.records import peer_record
from tests.support.threads import start_all
from tests.support.waiting import until
from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.record_reader import RecordReader
from zrpc.membership.rendezvous import (
    RendezvousTiming,
    StoreLost,
    digest_of,
    meet,
)
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore

SOON = 10.0
TIMING = RendezvousTiming()
Connect = Callable[[], dist.Store]
_starts = itertools.count()


def record(rank: int, world_size: int, **changes: Any) -> PeerRecord:
    """Returns the record of a worker's new start."""
    return peer_record(rank, world_size, start=next(_starts), **changes)


every_store = pytest.mark.parametrize("connect", ["hash", "file", "tcp"], indirect=True)


@pytest.fixture
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Returns a function that gives a worker its own connection to the store."""
    kind = getattr(request, "param", "hash")
    if kind == "hash":
        store = dist.HashStore()
        yield lambda: store
    elif kind == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
    else:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", host.port, is_master=False)


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
    for size in (1, 2, 7):
        records = [record(rank, size) for rank in range(size)]
        found = start(connect, records[:1], listen=lambda found: f"0 of {len(found)}")
        late = start(connect, records[1:], listen=lambda found: f"not 0 of {len(found)}")
        listening = [
            replace(each, endpoint=f"{'not ' * bool(each.rank)}0 of {size}") for each in records
        ]
        assert found() + late() == [listening] * size


@every_store
@pytest.mark.system
def test_records_of_an_earlier_mesh_are_not_used(connect: Connect) -> None:
    # The store outlives the mesh, as torchrun's does.
    earlier = [record(rank, 3) for rank in range(3)]
    start(connect, earlier)()
    records = [record(rank, 3) for rank in range(3)]
    first = start(connect, records[:2])  # they see an old record of rank 2
    assert start(connect, records[2:])() == [records]
    assert first() == [records] * 2


@every_store
def test_a_worker_that_tries_again_while_others_wait(connect: Connect) -> None:
    left_again = record(1, 3)
    waiting = [record(0, 3)]
    first = start(connect, waiting)
    [outcome] = start(connect, [left_again], timeout=0.05)()
    assert isinstance(outcome, RendezvousError)
    others = [record(1, 3), record(2, 3)]
    assert start(connect, others)() == [waiting + others] * 2
    assert first() == [waiting + others]


class PlayedHost:
    """Hosts the store, and plays all ranks but 1, which meets there."""

    def __init__(self, size: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.entries = SignedStore(self._store, None)
        port = self._store.port
        self.records = [record(rank, size) for rank in range(size)]
        for other in self.records:
            if other.rank != 1:
                self.entries.set(f"record/{other.rank}", other.dump())
        self.digest = digest_of(self.records)
        self.outcome = start(
            lambda: dist.TCPStore("127.0.0.1", port, is_master=False), self.records[1:2], 3 * SOON
        )

    def confirm(self) -> None:
        self.entries.set(f"{self.digest}/0", "=")

    def end(self) -> Any:
        del self.entries, self._store
        begun = time.monotonic()
        [outcome] = self.outcome()
        assert time.monotonic() - begun < SOON
        return outcome


def test_a_host_that_has_met_the_others_and_exits() -> None:
    host = PlayedHost(2)
    host.confirm()
    host.entries.get(f"{host.digest}/outcome")  # waits for it
    assert host.end() == host.records


def test_a_host_that_exits_before_it_knows_that_all_have_met() -> None:
    host = PlayedHost(3)
    host.confirm()
    host.entries.get(f"{host.digest}/1")
    error = host.end()
    assert isinstance(error, RendezvousError)
    assert not isinstance(error, StoreLost)
    assert f"which is {host.records[0].info}, or the launcher" in str(error)


@pytest.mark.system
def test_a_host_that_exits_and_may_be_that_of_an_earlier_mesh() -> None:
    host = PlayedHost(2)
    host.entries.get("record/1")
    assert isinstance(host.end(), StoreLost)


def test_a_host_of_another_world_size_that_exits_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sizes explain more than the loss of the store does."""
    error = error_if_host_exits_first(monkeypatch, record(1, 3), record(0, 2))
    assert "expects a world of 2 workers, but worker" in str(error)
    assert "one of 3; then the store was lost" in str(error)


def test_ranks_that_are_missing_when_the_host_exits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time may have run out before that of the others."""
    error = error_if_host_exits_first(monkeypatch, record(1, 4), record(0, 4))
    assert re.search(r"but ranks 2-3 are missing: .*; then the store was lost", str(error))


def error_if_host_exits_first(
    monkeypatch: pytest.MonkeyPatch, late: PeerRecord, first: PeerRecord
) -> Exception:
    """Returns the error of a worker whose host exits once the worker has read its record."""
    read = threading.Event()
    present = RecordReader.present

    def read_and_tell(self: RecordReader, ranks: list[int]) -> list[PeerRecord]:
        try:
            return present(self, ranks)
        finally:
            read.set()

    monkeypatch.setattr(RecordReader, "present", read_and_tell)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    entries = SignedStore(store, None)
    entries.set("record/0", first.dump())
    connect = partial(dist.TCPStore, "127.0.0.1", port, is_master=False)
    outcome = start(connect, [late])
    assert read.wait(SOON)
    del entries, store
    [error] = outcome()
    assert isinstance(error, StoreLost)
    return error


@pytest.mark.system
@every_store
def test_missing_ranks_are_named_at_the_deadline(connect: Connect) -> None:
    for error in start(connect, [record(0, 4), record(2, 4)], timeout=0.2)():
        assert isinstance(error, RendezvousError)
        assert re.search(
            r"expected 4 workers( at 127.0.0.1:\d+)? within 0.2 s, but ranks 1, 3 are missing: "
            r"start them, or check RANK and WORLD_SIZE.*ZRPC_INIT_TIMEOUT.*; hosts .*: "
            r"node0 \(0, 2\)$",
            str(error),
        )
    [error] = start(connect, [record(1, 4)], timeout=0.0)()
    assert "within 0 s" in str(error)


@pytest.mark.system
def test_workers_that_left_again_are_named(connect: Connect) -> None:
    stale = record(1, 2, name="gone")
    [outcome] = start(connect, [stale], timeout=0.05)()
    assert isinstance(outcome, RendezvousError)
    [error] = start(connect, [record(0, 2)], timeout=0.2)()
    assert isinstance(error, RendezvousError)
    assert "WorkerInfo(id=1, name=gone)" in str(error)
    assert "left again, or are from an earlier run" in str(error)


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


@every_store
def test_why_workers_can_not_form_a_mesh_is_told_to_all(connect: Connect) -> None:
    same = [record(0, 2, name="same"), record(1, 2, name="same")]
    text = "worker name same is not unique: ranks 0 and 1 both have it"
    for error in start(connect, same)():
        assert isinstance(error, RendezvousError)
        assert text in str(error)
    for hook in ("listen", "check"):
        for error in start(connect, [record(0, 2), record(1, 2)], **{hook: refuse})():
            assert isinstance(error, AuthenticationError)
            assert "these can't form a mesh" in str(error)


def test_a_worker_that_can_not_listen_is_named(connect: Connect) -> None:
    other = start(connect, [record(0, 3), record(1, 3)])
    [own] = start(connect, [record(2, 3)], listen=refuse)()
    assert isinstance(own, AuthenticationError)
    for error in other():
        assert isinstance(error, RendezvousError)
        assert "expected all workers to publish where they listen, but WorkerInfo(id=2," in str(
            error
        )
        assert "on node0 failed: these can't form a mesh" in str(error)


def test_a_worker_listens_again_for_a_record_that_was_replaced(connect: Connect) -> None:
    stale, first = record(1, 2), record(0, 2)
    start(connect, [stale], timeout=0.05)()
    seen: list[PeerRecord] = []

    def listen(records: list[PeerRecord]) -> str:
        seen.append(records[1])
        return refuse(records) if records[1] == stale else "here"

    waiting = start(connect, [first], listen=listen)
    until(lambda: seen)
    second = record(1, 2)
    assert start(connect, [second])() == waiting()
    assert seen == [stale, second]


def start_and_take_part_by_hand(
    connect: Connect, timing: RendezvousTiming = TIMING, hook: str = "check"
) -> tuple[Callable[[], list[Any]], Callable[[], None]]:
    """Starts rank 0, and plays rank 1 until it reads why there is no mesh."""
    records = [record(rank, 2) for rank in range(2)]
    finish = start(connect, records[:1], timing=timing, **{hook: refuse})
    store = connect()
    entries, digest = SignedStore(store, None), digest_of(records)
    entries.set("record/1", records[1].dump())
    entries.set(f"{digest}/1", "=")
    store.wait([f"zrpc/{digest}/0/refused"], timedelta(seconds=SOON))  # rank 0 knows
    return finish, lambda: entries.set(f"{digest}/1/refused", "1")


@pytest.mark.system
@pytest.mark.parametrize("hook", ["check", "listen"])
def test_rank_0_stays_until_the_others_have_read_why(connect: Connect, hook: str) -> None:
    # It might close the store, and the others would report a lost connection.
    finish, read = start_and_take_part_by_hand(connect, hook=hook)
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(finish)
        assert not wait([outcome], 0.2).done
        read()
        [error] = outcome.result(SOON)
    assert "these can't form a mesh" in str(error)


def test_rank_0_does_not_wait_for_dead_workers(connect: Connect) -> None:
    finish, _ = start_and_take_part_by_hand(connect, RendezvousTiming(failure_read_seconds=0.1))
    [error] = finish()
    assert "these can't form a mesh" in str(error)


def test_one_rank_twice() -> None:
    store = dist.HashStore()
    entries = SignedStore(store, None)
    first, second = record(0, 2, name="first"), record(0, 2, name="second")
    outcome = start(lambda: store, [first], timeout=SOON)
    until(lambda: entries.check(["record/0"]))
    others = start(lambda: store, [second], timeout=SOON)
    until(lambda: entries.get("record/0") == second.dump())
    last = start(lambda: store, [record(1, 2)], timeout=SOON)
    [error] = outcome()
    assert isinstance(error, RendezvousError)
    places = r"first \(pid 0 on node0\) and second \(pid 0 on node0\) both have it"
    assert re.search(rf"rank 0 is not unique: workers {places}", str(error))
    assert others() == last()


QUICK = RendezvousTiming(present_check_seconds=0.01, read_seconds_per_rank=0.001)


@pytest.mark.system
def test_all_are_told_which_rank_came_twice_and_from_where(connect: Connect) -> None:
    entries = SignedStore(connect(), None)
    host, first = record(0, 3), record(1, 3, name="first", pid=11, host="a")
    second = record(1, 3, name="second", pid=12, host="b")
    outcomes = start(connect, [host, first], timeout=1.0, timing=QUICK)
    until(lambda: entries.check(["record/0", "record/1"]))
    more = start(connect, [second], timeout=1.0, timing=QUICK)
    for error in [*outcomes(), *more()]:
        assert isinstance(error, RendezvousError)
        assert (
            "but rank 1 came twice, from first (pid 11 on a) and second (pid 12 on b), and rank 2 "
            "is missing: start them, or check RANK and WORLD_SIZE"
        ) in str(error)
    # In the next run there is one of each.
    again = [record(0, 3), record(1, 3)]
    for error in start(connect, again, timeout=0.2, timing=QUICK)():
        assert "but rank 2 is missing" in str(error)


def test_worker_that_is_started_in_the_place_of_another_is_met(connect: Connect) -> None:
    entries = SignedStore(connect(), None)
    replaced, host = record(1, 3, name="replaced"), record(0, 3)
    waiting = start(connect, [host, replaced], timing=QUICK)
    until(lambda: entries.check(["record/0", "record/1"]))
    others = [record(1, 3), record(2, 3)]
    first = start(connect, others[:1], timing=QUICK)
    until(lambda: entries.check(["same rank"]))
    assert start(connect, others[1:], timing=QUICK)() == [[host, *others]]
    assert first() == [[host, *others]]
    met, error = waiting()
    assert met == [host, *others]
    places = "replaced (pid 0 on node0) and worker1 (pid 0 on node0)"
    assert f"rank 1 is not unique: workers {places} both have it" in str(error)


@pytest.mark.system
def test_a_worker_that_waits_for_too_long_when_all_others_have_met(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All go on, or none: its time is over just when the others have seen that it is there."""
    records = [record(0, 2), record(1, 2)]
    key = f"{digest_of(records)}/1"
    check = SignedStore.check
    met: list[Any] = []

    def overlook(entries: SignedStore, keys: Any) -> bool:
        if key in keys and len(keys) == 1 and threading.current_thread().name == "late":
            time.sleep(0.01)  # it polls
            return False
        return check(entries, keys)

    monkeypatch.setattr(SignedStore, "check", overlook)
    late = threading.Thread(
        target=lambda: met.append(meet(connect(), records[0], 1.0)), name="late", daemon=True
    )
    late.start()
    assert start(connect, records[1:])() == [records]
    late.join(SOON)
    assert met == [records]


@pytest.mark.system
def test_world_sizes_that_differ(connect: Connect) -> None:
    errors = start(connect, [record(0, 2), record(1, 3)], timeout=0.5)()
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert "expects a world of" in str(error)
        assert "one of" in str(error)


def test_a_store_that_fails_is_a_rendezvous_error() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    del host
    with pytest.raises(RendezvousError, match="the store failed while the workers were meeting"):
        meet(client, record(0, 1), 1)


@pytest.mark.system
def test_a_worker_that_waits_for_half_of_256_asks_for_few_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worker waits like that, for minutes if a host is late, in one store."""
    asked = 0
    for method in (SignedStore.check, SignedStore.get_all_raw):

        def counted(entries: SignedStore, keys: list[str], method: Any = method) -> Any:
            nonlocal asked
            asked += len(keys)
            return method(entries, keys)

        monkeypatch.setattr(SignedStore, method.__name__, counted)
    store = dist.HashStore()
    entries = SignedStore(store, None)
    for rank in range(1, 256, 2):
        entries.set(f"record/{rank}", record(rank, 256).dump())
    with pytest.raises(RendezvousError, match=r"ranks 2, 4, 6, .* are missing"):
        meet(store, record(0, 256), timeout=2.0)
    # All ranks twice at its start and once for the error, the records that exist twice, and the
    # first missing one at each look.
    assert 256 < asked < 5 * 256


def test_a_worker_stops_waiting_for_others_when_the_launcher_stops_all(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(tmp_path))
    note = tmp_path / "launch-stops"
    note.touch()  # it is being written
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, connect(), record(0, 2), 60.0)
        assert not wait([waiting], 0.1).done
        note.write_text("rank 1 failed (exit code 3)")
        with pytest.raises(
            RendezvousError, match=r"stops all workers: rank 1 failed \(exit code 3"
        ):
            waiting.result(SOON)
