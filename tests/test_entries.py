"""Entries of a store: what is signed is read, and nothing else."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rendezvous import card
from waiting import until

import zrpc.rendezvous
from zrpc.card import Card
from zrpc.entries import Entries
from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.rendezvous import exchange, meet
from zrpc.secret import ClusterSecret

SOON = 10.0
GOOD, BAD = ClusterSecret("good" * 16), ClusterSecret("evil" * 16)


@pytest.mark.parametrize("secret", [None, GOOD])
def test_what_is_written_is_read(secret):
    entries = Entries(dist.HashStore(), secret)
    for value in ("", "value", "wörd and space", "x" * 10_000):
        entries.set("key", value)
        assert entries.get("key") == value


@pytest.mark.parametrize(
    ("writer", "reader", "told"),
    [
        (BAD, GOOD, "signed with another cluster secret, or forged"),
        (None, GOOD, "is not signed: give the worker that wrote it the same"),
        (GOOD, None, "is signed with a cluster secret, but this worker has none"),
    ],
)
def test_another_secret(writer, reader, told):
    store = dist.HashStore()
    Entries(store, writer).set("key", "value")
    with pytest.raises(AuthenticationError, match=told) as caught:
        Entries(store, reader).get("key")
    assert "ZRPC_SECRET_FILE" in str(caught.value)


def test_an_entry_serves_under_no_other_key():
    store = dist.HashStore()
    entries = Entries(store, GOOD)
    entries.set("card/0", "value")
    raw = entries.raw("card/0")
    with pytest.raises(AuthenticationError, match="forged"):
        entries.opened("card/1", raw)


@settings(deadline=None)
@given(st.binary(max_size=200), st.booleans())
@example(b"", True)
@example(b" ", True)
@example(b"-", True)
@example(b"0" * 64 + b" {}", True)
@example(b"x" * 100_000, False)
def test_other_bytes_are_refused(data, signed):
    entries = Entries(dist.HashStore(), GOOD if signed else None)
    if not signed and data.startswith((b"- ", b"-")) and data.partition(b" ")[0] == b"-":
        return
    with pytest.raises(AuthenticationError):
        entries.opened("key", data)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at, change):
    entries = Entries(dist.HashStore(), GOOD)
    entries.set("key", "some value")
    raw = bytearray(entries.raw("key"))
    raw[at % len(raw)] ^= change
    with pytest.raises(AuthenticationError):
        entries.opened("key", bytes(raw))


# -- cards ---------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(values | st.dictionaries(st.sampled_from(list(Card.__slots__)), values))
def test_what_is_no_card(value):
    with pytest.raises(ValueError, match="card"):
        Card.parse(json.dumps(value))


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"},
        {"rank": True},
        {"token": "z" * 32},
        {"token": ""},
        {"name": "not a name"},
        {"ipc": 1},
        {"more": 1},
    ],
)
def test_a_card_with_something_wrong(change):
    values = json.loads(card(0, 1).dump())
    with pytest.raises(ValueError, match="card"):
        Card.parse(json.dumps({**values, **change}))


def test_a_card_is_read_as_it_was_written():
    mine = card(0, 1)
    assert Card.parse(mine.dump()) == mine


# -- the rendezvous ------------------------------------------------------------------------


def start(store, *members, timeout=SOON):
    """Starts to meet, with a secret each; gives cards or errors when asked."""
    outcomes = {}

    def run(number, mine, secret):
        try:
            outcomes[number] = meet(store, mine, timeout, secret)
        except Exception as error:
            outcomes[number] = error

    threads = [
        threading.Thread(target=run, args=(n, *member), daemon=True)
        for n, member in enumerate(members)
    ]
    for thread in threads:
        thread.start()

    def finish():
        for thread in threads:
            thread.join(2 * SOON)
            assert not thread.is_alive(), "the rendezvous does not end"
        return [outcomes[n] for n in range(len(members))]

    return finish


def test_all_with_one_secret_meet():
    cards = [card(rank, 3) for rank in range(3)]
    store = dist.HashStore()
    assert start(store, *[(mine, GOOD) for mine in cards])() == [cards] * 3


@pytest.mark.parametrize("other", [BAD, None])
def test_two_secrets_are_told_at_both_ends_and_soon(other, caplog):
    begun = time.monotonic()
    errors = start(dist.HashStore(), (card(0, 2), GOOD), (card(1, 2), other))()
    assert time.monotonic() - begun < SOON / 2
    for rank, error in enumerate(errors):
        assert isinstance(error, AuthenticationError)
        assert f"(rank {rank}) and the worker of rank {1 - rank} refuse each other" in str(error)
        assert "ZRPC_SECRET_FILE" in str(error)
        told = f"name=worker{rank}) refuses what claims to be worker {1 - rank}"
        assert sum(told in record.getMessage() for record in caplog.records) == 1


def test_two_secrets_are_told_while_a_third_worker_is_missing(monkeypatch):
    monkeypatch.setattr(zrpc.rendezvous, "_LOOK", 0.1)
    begun = time.monotonic()
    errors = start(dist.HashStore(), (card(0, 3), GOOD), (card(1, 3), BAD))()
    assert time.monotonic() - begun < SOON / 2
    assert all("refuse each other" in str(error) for error in errors)


def test_both_are_told_where_one_takes_the_store_with_it():
    # As a TCPStore does, with the process of rank 0.
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    second = start(client, (card(1, 2), BAD))
    [first] = start(host, (card(0, 2), GOOD))()
    del host
    for error in (first, *second()):
        assert isinstance(error, AuthenticationError), error


def test_what_a_stranger_left_is_waited_out(caplog):
    store = dist.HashStore()
    forged = card(1, 2)
    Entries(store, BAD).set("card/1", forged.dump())
    mine, real = card(0, 2), card(1, 2)
    first = start(store, (mine, GOOD))
    until(lambda: "refuses what claims to be worker 1" in caplog.text)
    assert start(store, (real, GOOD))() == [[mine, real]]
    assert first() == [[mine, real]]


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"{}",
        b"- {}",
        b"- null",
        b"- " + b"[" * 60_000,
        b"- \xff",
        b"0" * 64 + b' {"token": "' + b"0" * 32 + b'"}',
        b"x" * 1_000_000,
    ],
)
@pytest.mark.parametrize("secret", [None, GOOD])
def test_rubbish_in_place_of_a_card_is_told_at_the_end(entry, secret):
    store = dist.HashStore()
    dist.PrefixStore("zrpc", store).set("card/1", entry)
    [error] = start(store, (card(0, 2), secret), timeout=0.1)()
    assert isinstance(error, AuthenticationError)
    assert "what claims to be ranks [1] was refused. Rank 1: " in str(error)


def test_the_card_of_another_rank_is_refused():
    store = dist.HashStore()
    entries = Entries(store, None)  # with a secret, the signature would not fit already
    entries.set("card/1", card(2, 3).dump())
    [error] = start(store, (card(0, 2), None), timeout=0.1)()
    assert isinstance(error, AuthenticationError)
    assert "expected the card of rank 1, found that of 2" in str(error)


def test_a_replayed_worker_is_not_met():
    # All that rank 1 wrote in an earlier run, with the right secret, is written again.
    earlier = RecordingStore()
    outcomes = start(earlier, (card(0, 2), GOOD), (card(1, 2), GOOD))()
    assert all(isinstance(outcome, list) for outcome in outcomes)
    recorded = {k: v for k, v in earlier.entries.items() if k.endswith("/1")}
    assert len(recorded) == 2  # a card, and its confirmation
    store = dist.HashStore()
    for key, value in recorded.items():
        store.set(key, value)
    [error] = start(store, (card(0, 2), GOOD), timeout=0.3)()
    assert isinstance(error, RendezvousError)
    assert "are from an earlier run" in str(error)


def test_a_replayed_confirmation_is_refused():
    earlier = RecordingStore()
    start(earlier, (card(0, 2), GOOD), (card(1, 2), GOOD))()
    recorded = {k: v for k, v in earlier.entries.items() if k.endswith("/1")}
    [confirmation] = [value for key, value in recorded.items() if "card" not in key]
    store = RecordingStore()
    for key, value in recorded.items():
        store.set(key, value)
    store.answer = confirmation  # to whatever rank 0 asks rank 1 to confirm
    [error] = start(store, (card(0, 2), GOOD), timeout=2)()
    assert isinstance(error, AuthenticationError)
    assert "forged" in str(error)


class RecordingStore(dist.Store):
    """Remembers what was written; may confirm in the name of rank 1."""

    def __init__(self):
        super().__init__()
        self.entries = {}
        self.answer = None

    def set(self, key, value):
        self.entries[key] = value if isinstance(value, bytes) else value.encode()
        if self.answer is not None and key.endswith("/0") and "card" not in key:
            self.entries[key.removesuffix("/0") + "/1"] = self.answer

    def get(self, key):
        return self.entries[key]

    def multi_get(self, keys):
        return [self.entries[key] for key in keys]

    def check(self, keys):
        return all(key in self.entries for key in keys)


def test_a_card_that_was_replaced_by_a_stranger_is_noticed():
    store = dist.HashStore()
    first = start(store, (card(0, 2), GOOD))
    entries = Entries(store, BAD)
    until(lambda: entries.check(["card/0"]))
    entries.set("card/0", card(0, 2).dump())
    second = start(store, (card(1, 2), GOOD), timeout=0.3)
    [error] = first()
    assert isinstance(error, AuthenticationError)
    assert "the card of worker worker0 (rank 0) was replaced" in str(error)
    second()


def test_a_second_round_is_signed_too():
    store = dist.HashStore()
    cards = [card(rank, 2) for rank in range(2)]
    told = []

    def run():
        try:
            exchange(store, cards, 0, "mine", SOON, GOOD)
        except AuthenticationError as error:
            told.append(str(error))

    honest = threading.Thread(target=run)
    honest.start()
    with pytest.raises(AuthenticationError, match="forged"):
        exchange(store, cards, 1, "forged", SOON, BAD)
    honest.join(SOON)
    assert not honest.is_alive()
    assert "forged" in told[0]
