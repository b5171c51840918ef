"""The news of a mesh, in any kind of store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from zrpc.card import Card
from zrpc.entries import Entries
from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.item import Departure, Item, Verb
from zrpc.news import News, take_ranks
from zrpc.roster import Roster
from zrpc.secret import ClusterSecret, new_secret
from zrpc.summary import Summary
from zrpc.worker_info import RANKS

SECRET = ClusterSecret(new_secret())


@pytest.fixture(params=["hash", "file", "tcp"])
def open_store(request, tmp_path):
    """Opens the store as one more process would."""
    if request.param == "tcp":
        limit = timedelta(seconds=20)
        host = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", host.port, None, False, limit)
    elif request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
    else:
        store = dist.HashStore()
        yield lambda: store


@pytest.fixture
def store():
    return dist.HashStore()


def news_in(store, secret=SECRET):
    return News(Entries(store, secret))


def item(token):
    return Item(Verb.IN, str(token))


def test_all_read_the_same_in_the_same_order(open_store):
    readers = [news_in(open_store()) for _ in range(3)]
    readers[0].post(item("a"))
    readers[1].post(item("b"))
    assert readers[0].read() == [item("a"), item("b")]
    assert readers[0].read() == []
    readers[0].post(item("c"))
    assert [reader.read() for reader in readers[1:]] == [[item(c) for c in "abc"]] * 2
    assert readers[0].read() == [item("c")]


def test_many_write_at_once_and_nothing_is_lost(open_store):
    writers = [news_in(open_store()) for _ in range(4)]

    def write(number):
        for i in range(10):
            writers[number].post(item(f"{number}.{i}"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = news_in(open_store()).read()
    assert sorted(i.token for i in found) == sorted(f"{n}.{i}" for n in range(4) for i in range(10))
    for writer in writers:
        assert writer.read() == found


def test_how_far_others_have_read(open_store):
    one, other = news_in(open_store()), news_in(open_store())
    assert one.noted("x") == 0
    other.note("x", 3)
    one.note("y", 0)
    other.note("x", 4)
    assert other.noted("x") == 4  # TCPStore does not wait until what it sends has come in
    assert [one.noted("x"), one.noted("y")] == [4, 0]
    one.withdraw("x")
    assert other.noted("x") == 0


def test_ranks_are_given_once(open_store):
    assert take_ranks(Entries(open_store(), None), 3) == 0
    assert [news_in(open_store()).next_rank() for _ in range(2)] == [3, 4]


def test_an_item_that_is_not_signed_is_passed_over(store, caplog):
    news, other = news_in(store), news_in(store)
    mesh = Entries(store, SECRET).get("mesh")
    dist.PrefixStore("zrpc", store).set(f"news/{mesh}/0", "- " + item("forged").dump())
    news.post(item("true"))
    assert other.read() == [None, item("true")]
    assert "an item of the mesh's news is refused" in caplog.text
    assert "is not signed" in caplog.text


def test_an_item_in_the_place_of_another_is_passed_over(store, caplog):
    """As when somebody who can write to the store repeats what an old incarnation has said."""
    news, other = news_in(store), news_in(store)
    news.post(item("old"))
    raw = dist.PrefixStore("zrpc", store)
    mesh = Entries(store, SECRET).get("mesh")
    raw.set(f"news/{mesh}/1", raw.get(f"news/{mesh}/0"))
    assert other.read() == [item("old"), None]
    assert "signed with another cluster secret, or forged" in caplog.text


def test_an_item_of_an_earlier_mesh_is_passed_over(store, caplog):
    """With the same secret: the mesh's id is signed, too."""
    earlier = dist.HashStore()
    news_in(earlier).post(item("old"))
    entry = dist.PrefixStore("zrpc", earlier).get(f"news/{Entries(earlier, SECRET).get('mesh')}/0")
    news = news_in(store)
    mesh = Entries(store, SECRET).get("mesh")
    dist.PrefixStore("zrpc", store).set(f"news/{mesh}/0", entry)
    assert news.read() == [None]


@pytest.mark.parametrize("secrets", [(SECRET, None), (None, SECRET)])
def test_who_has_another_secret_reads_nothing(store, secrets):
    news_in(store, secrets[0])
    with pytest.raises(AuthenticationError, match="ZRPC_SECRET"):
        news_in(store, secrets[1])


# -- old news ------------------------------------------------------------------------------------


def visit(news, roster, number, shorten=True):
    """Somebody comes and goes, and the reader of these news hears of it."""
    card = Card(f"w{number}", number, 0, f"{number:032x}", "", "", "")
    news.note(card.token, 0)
    for verb, fields in ((Verb.JOIN, {"card": card}), (Verb.GONE, {"why": Departure.LEFT})):
        assert news.post(Item(verb, card.token, **fields))
        for found in news.read():
            roster.read(found)
        if shorten:
            news.shorten(roster, 0)


def read_by(news):
    roster = Roster()
    for found in news.read():
        roster.read(found)
    return roster


def test_old_news_are_forgotten_in_any_store(open_store):
    store = open_store()
    frozen, early = news_in(open_store()), Roster()
    steady, roster = news_in(store), Roster()
    counts = []
    for number in range(100):
        visit(steady, roster, number)
        counts.append(store.num_keys())
        if number == 10:
            for found in frozen.read():
                early.read(found)
    assert counts[-1] < 3 * 40 + 10
    late = news_in(open_store())
    [summary, *rest] = late.read()
    assert isinstance(summary, Summary)
    assert len(rest) < 40
    for _ in range(5):  # it looks only now and then whether its place is still there
        for found in frozen.read():
            early.read(found)
    assert early.summary() == roster.summary() == read_by(news_in(open_store())).summary()
    assert frozen.post(item("a"))
    assert [reader.read() for reader in (late, steady)] == [[item("a")]] * 2


class Plain(dist.Store):
    """A store of somebody's own, which can do what torch asks for, and can't delete."""

    def __init__(self):
        super().__init__()
        self.entries = {}

    def set(self, key, value):
        self.entries[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.entries[key]

    def add(self, key, amount):
        self.entries[key] = str(int(self.entries.get(key, b"0")) + amount).encode()
        return int(self.entries[key])

    def check(self, keys):
        return all(key in self.entries for key in keys)

    def compare_set(self, key, expected, value):
        if self.entries.get(key, b"") == expected:
            self.entries[key] = value
        return self.entries.get(key, expected)


def test_a_store_that_cant_forget_is_left_as_it_is():
    store = Plain()
    news, roster = news_in(store), Roster()
    for number in range(30):
        visit(news, roster, number)
    assert len(news_in(store).read()) == 60
    assert news.noted(f"{3:032x}") == 0
    news.withdraw(f"{3:032x}")


@pytest.mark.parametrize("what", ["horizon", "summary"])
@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ("- [1]", AuthenticationError, "is not signed"),
        (None, RendezvousError, "expected (the horizon|a summary) of a mesh's news"),
    ],
)
def test_a_beginning_that_cant_be_read(store, what, entry, error, words):
    news, roster = news_in(store), Roster()
    for number in range(20):
        visit(news, roster, number)
    entries = Entries(store, SECRET)
    key = f"{what}/{entries.get('mesh')}" + ("/1" if what == "summary" else "")
    if entry is None:
        entries.set(key, "[]")
    else:
        dist.PrefixStore("zrpc", store).set(key, entry)
    with pytest.raises(error, match=words):
        news_in(store).read()


def test_a_summary_that_is_missing(store):
    news, roster = news_in(store), Roster()
    for number in range(20):
        visit(news, roster, number)
    entries = Entries(store, SECRET)
    entries.delete(f"summary/{entries.get('mesh')}/1")
    with pytest.raises(RendezvousError, match="something else has deleted it"):
        news_in(store).read()


def test_a_summary_in_whose_place_something_else_is(store, caplog):
    news, roster = news_in(store), Roster()
    mesh = Entries(store, SECRET).get("mesh")
    dist.PrefixStore("zrpc", store).set(f"summary/{mesh}/1", "- forged")
    for number in range(40):
        visit(news, roster, number)
    assert caplog.text.count("the mesh's news are not shortened: the entry") == 1
    assert read_by(news_in(store)).summary() == roster.summary()


def test_an_old_horizon_is_not_believed(store):
    """As where somebody who can write to the store repeats it."""
    news, roster = news_in(store), Roster()
    entries = Entries(store, SECRET)
    raw, key = dist.PrefixStore("zrpc", store), f"horizon/{entries.get('mesh')}"
    for number in range(20):
        visit(news, roster, number)
    old = raw.get(key)
    for number in range(20, 80):
        visit(news, roster, number)
    raw.set(key, old)
    assert news.post(item("a"))
    assert news.read() == [item("a")]
    with pytest.raises(RendezvousError, match="found none"):
        news_in(store).read()


def test_ranks_begin_again_when_all_were_given(store):
    entries = Entries(store, SECRET)
    assert take_ranks(entries, RANKS - 3) == 0
    assert news_in(store).next_rank() == RANKS - 3
    assert take_ranks(entries, 4) == 2  # one after the other
    assert news_in(store).next_rank() == 6
