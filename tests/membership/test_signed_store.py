"""Entries of a store: only validly signed ones are accepted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from tests.membership.test_rendezvous import record
from tests.support.stores import RecordingStore
from tests.support.threads import assert_raised, start_all
from tests.support.waiting import until
from zrpc.errors import AuthenticationError, RpcError
from zrpc.membership.attendance import Arrival
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.rendezvous import RendezvousTiming, meet
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore

SOON = 10.0
HASTY = RendezvousTiming(failure_read_seconds=0.1)
GOOD, BAD = ClusterSecret("good" * 16), ClusterSecret("evil" * 16)


def test_another_secret_or_the_place_of_another_entry() -> None:
    for writer, reader, told in (
        (BAD, GOOD, "signed with another cluster secret, or forged"),
        (None, GOOD, "is not signed: give the worker that wrote it the same"),
        (GOOD, None, "is signed with a cluster secret, but this worker has none"),
    ):
        store = dist.HashStore()
        SignedStore(store, writer).set("key", "value")
        with pytest.raises(AuthenticationError, match=told) as caught:
            SignedStore(store, reader).get("key")
        assert "ZRPC_SECRET_FILE" in str(caught.value)
    entries = SignedStore(dist.HashStore(), GOOD)
    entries.set("record/0", "value")
    with pytest.raises(AuthenticationError, match="forged"):
        entries.verified("record/1", entries.get_raw("record/0"))


@given(st.binary(max_size=200), st.booleans())
@example(b"", True)
@example(b" ", True)
@example(b"-", True)
@example(b"0" * 64 + b" {}", True)
@example(b"x" * 100_000, False)
def test_other_bytes_are_refused(data: bytes, signed: bool) -> None:
    entries = SignedStore(dist.HashStore(), GOOD if signed else None)
    if not signed and data.startswith((b"- ", b"-")) and data.partition(b" ")[0] == b"-":
        return
    with pytest.raises(AuthenticationError):
        entries.verified("key", data)


# -- peer records ---------------------------------------------------------------------------------


def test_a_peer_record_is_read_as_it_was_written() -> None:
    mine = record(0, 1)
    assert PeerRecord.parse(mine.dump()) == mine
    values = json.loads(mine.dump())
    for name, value in (
        *(("rank", "0"), ("rank", True), ("token", "z" * 32), ("token", ""), ("name", None)),
        *(("name", "not a name"), ("ipc", 1), ("more", 1), ("public_key", []), ("restarts", {})),
    ):
        with pytest.raises(ValueError, match="record"):
            PeerRecord.parse(json.dumps({**values, name: value}))
    for value in (None, True, 7, "text", [], [values], {}):
        with pytest.raises(ValueError, match="record"):
            PeerRecord.parse(json.dumps(value))


# -- the rendezvous ------------------------------------------------------------------------


def start(
    store: dist.Store,
    *members: tuple[PeerRecord, ClusterSecret | None],
    timeout: float = SOON,
    timing: RendezvousTiming = RendezvousTiming(),  # noqa: B008
) -> Callable[[], list[Any]]:
    """Starts workers with a secret each; returns a function that returns records or errors."""
    calls = [partial(meet, store, mine, timeout, secret, timing) for mine, secret in members]
    return start_all(calls, 2 * SOON)


@pytest.mark.parametrize(("size", "other"), [(2, BAD), (2, None), (3, BAD)])
def test_both_workers_soon_report_different_secrets(
    size: int, other: ClusterSecret | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while a third worker is missing."""
    begun = time.monotonic()
    workers = (record(0, size), GOOD), (record(1, size), other)
    errors = start(dist.HashStore(), *workers, timing=RendezvousTiming(look_seconds=0.1))()
    assert time.monotonic() - begun < SOON / 2
    for rank, error in enumerate(errors):
        assert isinstance(error, AuthenticationError)
        assert f"(rank {rank}) and the worker of rank {1 - rank} refuse each other" in str(error)
        assert "ZRPC_SECRET_FILE" in str(error)
        told = f"name=worker{rank}) refuses what claims to be worker {1 - rank}"
        assert sum(told in record.getMessage() for record in caplog.records) == 1


def test_both_report_different_secrets_if_one_hosts_the_store_and_exits() -> None:
    # As a TCPStore in the process of rank 0 does.
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    second = start(client, (record(1, 2), BAD))
    [first] = start(host, (record(0, 2), GOOD))()
    del host
    assert_raised([first, *second()], AuthenticationError)


def test_a_strangers_record_is_waited_out(caplog: pytest.LogCaptureFixture) -> None:
    """It may be that of the last launch, which had a secret of its own."""
    store = dist.HashStore()
    start(store, (record(0, 2), BAD), (record(1, 2), BAD))()
    mine, real = record(0, 2), record(1, 2)
    second = start(store, (real, GOOD))
    until(lambda: "refuses what claims to be worker 0" in caplog.text)
    assert start(store, (mine, GOOD))() == [[mine, real]]
    assert second() == [[mine, real]]


@pytest.mark.system
def test_garbage_in_place_of_a_peer_record_is_reported_at_the_timeout() -> None:
    for secret, entry in (
        *((None, b"- {}"), (None, b"- \xff"), (None, b"- " + b"[" * 60_000)),
        *((GOOD, b""), (GOOD, b"x" * 1_000_000), (GOOD, b"0" * 64 + b" {}")),
    ):
        store = dist.HashStore()
        dist.PrefixStore("zrpc", store).set("leader", entry)
        errors = start(store, (record(1, 2), secret), timeout=0.1)()
        assert_raised(errors, AuthenticationError, "what claims to be rank 0 was refused: ")


def test_what_is_written_in_the_place_of_a_record_is_refused_at_once() -> None:
    """It names the token of rank 0, so its author has read that."""
    for entry, text in (
        (b"- " + Arrival(record(2, 3)).dump().encode(), "record of rank 1, found that of 2"),
        (b"- null", "expected the record of a worker, found something else"),
        (b"- [" + b"[" * 60_000, "expected the record of a worker, found something else"),
        (b"\xff", "expected a signature and a value"),
    ):
        store, mine = dist.HashStore(), record(0, 2)
        dist.PrefixStore("zrpc", store).set(f"record/{mine.token}/1", entry)
        told = "worker worker0 (rank 0) and the worker of rank 1 refuse each other"
        assert_raised(start(store, (mine, None), timing=HASTY)(), RpcError, told, text)


@pytest.mark.parametrize("key", ["record/{}/1", "roster/{}/0", "roster/{}/1"])
def test_a_replayed_entry_is_refused(key: str) -> None:
    """An old one under the key of this mesh."""
    earlier, store = RecordingStore(), dist.HashStore()
    first = record(0, 2)
    start(earlier, (first, GOOD), (record(1, 2), GOOD))()
    host, other = record(0, 2), record(1, 2)
    replayed = earlier.entries[f"zrpc/{key.format(first.token)}"]
    dist.PrefixStore("zrpc", store).set(key.format(host.token), replayed)
    entries = SignedStore(store, GOOD)
    victim = host if key.startswith("record") else other
    if victim is other:
        entries.set("leader", host.dump())
        roster = json.dumps(["roster", host.dump(), other.dump()])
        entries.claim(f"roster/{host.token}/0", roster)
    errors = start(store, (victim, GOOD), timeout=2, timing=HASTY)()
    assert_raised(errors, AuthenticationError, "forged")


@pytest.mark.system
def test_a_peer_record_that_a_stranger_replaced_is_detected() -> None:
    store = dist.HashStore()
    first = start(store, (record(0, 2), GOOD))
    entries = SignedStore(store, BAD)
    until(lambda: entries.check(["leader"]))
    entries.set("leader", record(0, 2).dump())
    second = start(store, (record(1, 2), GOOD), timeout=0.3)
    replaced = "the record of worker worker0 (rank 0) was replaced"
    assert_raised(first(), AuthenticationError, replaced)
    second()
