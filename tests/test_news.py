"""The news of a mesh, in any kind of store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from zrpc.entries import Entries
from zrpc.errors import AuthenticationError
from zrpc.item import Item, Verb
from zrpc.news import News, take_ranks
from zrpc.secret import ClusterSecret, new_secret

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
