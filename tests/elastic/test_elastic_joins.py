"""Workers that join a mesh that runs, and what can be wrong with them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import zrpc as rpc
from zrpc.item import Departure, Item, Verb
from zrpc.secret import ClusterSecret
from zrpc.testing.leaks import lasting
from zrpc.transport.address import host_key
from zrpc.transport.curve import supports_curve


def names_told(agent, register):
    """The names that hooks are told, as they are."""
    names = []
    with agent.as_current():
        register(lambda worker: names.append(worker.name))
    return names


def call(agent, to, function=max, args=(1, 2)):
    with agent.as_current():
        return rpc.rpc_sync(to, function, args)


def test_a_worker_that_joins_is_known_to_all_at_once(elastic, until):
    first, second = elastic.join_all(2)
    told = names_told(first, rpc.on_worker_joined)
    third = elastic.join("late")
    assert third.worker_info == rpc.WorkerInfo("late", 0) or third.worker_info.id > 1
    for agent in (first, second):
        assert call(agent, "late") == 2
        assert call(third, agent.worker_info.name) == 2
        assert call(third, agent.worker_info.id) == 2
    with third.as_current():
        assert rpc.get_worker_info("w1") == rpc.WorkerInfo("w1", 1)
    until(lambda: told == ["w1", "late"], "the hook is told")


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_any_store_will_do(elastic, tmp_path, kind):
    if kind == "file":
        elastic.store = dist.FileStore(str(tmp_path / "store"), -1)
    else:
        with lasting():  # what torch's servers share
            dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        elastic.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agents = elastic.join_all(3)
    assert [call(agents[i], f"w{(i + 1) % 3}") for i in range(3)] == [2] * 3


def test_ranks_that_nobody_has_chosen(elastic):
    chosen = elastic.join("chosen", 1)
    others = [elastic.join(f"other{i}") for i in range(2)]
    ranks = [agent.worker_info.id for agent in (chosen, *others)]
    assert ranks == [1, 0, 2]


def test_many_join_at_once(elastic):
    with ThreadPoolExecutor(8) as pool:
        agents = list(pool.map(lambda i: elastic.join(f"w{i}"), range(8)))
    assert sorted(agent.worker_info.id for agent in agents) == list(range(8))
    for agent in agents:
        assert sorted(info.name for info in agent.membership.infos.values()) == sorted(
            f"w{i}" for i in range(8)
        )
        assert len(agent.membership.living) == 8


def test_joins_and_leaves_under_load(elastic):
    steady = elastic.join_all(2)
    stop = threading.Event()
    errors = []

    def call_all(agent):
        while not stop.is_set():
            for number in agent.membership.living:
                info = agent.membership.infos[number]
                try:
                    with agent.as_current():
                        assert rpc.rpc_sync(info, max, (number, -1)) == number
                except rpc.WorkerDied:
                    pass  # it has left meanwhile
                except Exception as error:
                    errors.append(error)
                    return

    threads = [threading.Thread(target=call_all, args=(agent,)) for agent in steady]
    for thread in threads:
        thread.start()
    try:
        for round in range(3):
            guest = elastic.join(f"guest{round}")
            assert call(guest, "w0", max, (round, -1)) == round
            guest.shutdown(graceful=False)
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert errors == []
    assert call(steady[0], "w1") == 2


@pytest.mark.skipif(not supports_curve(), reason="needs CURVE")
def test_members_by_tcp_admit_each_other_as_they_come(elastic, until):
    elastic.options["transport"] = "tcp"
    first = elastic.join("first", 0)
    second = elastic.join("second", 1)
    assert (call(first, "second"), call(second, "first")) == (2, 2)
    key = second.membership.cards[1].public_key.encode()
    assert key in first._network._gatekeeper._members
    second.shutdown()
    until(lambda: key not in first._network._gatekeeper._members, "its key is no member's")
    third = elastic.join("third", 1)
    assert (call(first, "third"), call(third, "first")) == (2, 2)


def test_workers_that_share_no_directory_talk_by_the_interface_that_is_named(elastic, monkeypatch):
    monkeypatch.setenv("ZRPC_IFACE", "127.0.0.1")
    first = elastic.join("first", 0)
    monkeypatch.setattr("zrpc.joining.host_key", lambda: "another/directory")
    with pytest.raises(rpc.RpcError, match="listens on no network: set ZRPC_IFACE"):
        elastic.join("far", 1)  # on another host, by its key
    monkeypatch.setattr("zrpc.joining.host_key", lambda: f"{host_key().split('/')[0]}/elsewhere")
    second = elastic.join("near", 1)
    assert not first.membership.shares_host(second.membership.rank)
    assert (call(first, "near"), call(second, "first")) == (2, 2)


# -- what is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank", "words"),
    [
        ("w1", 7, r"worker name w1 is not unique: worker w1 \(rank 1\)"),
        ("w1", None, r"worker name w1 is not unique: worker w1 \(rank 1\)"),
        ("other", 1, r"rank 1 is not unique: worker w1 \(rank 1\)"),
    ],
)
def test_a_name_or_a_rank_that_is_taken(elastic, monkeypatch, name, rank, words):
    monkeypatch.setattr("zrpc.elastic._DEATH_KNOWN_WITHIN", 15.0)
    agents = elastic.join_all(2)
    began = time.monotonic()
    with pytest.raises(rpc.RendezvousError, match=words):
        elastic.join(name, rank)
    assert time.monotonic() - began < 10  # that the other lives can be seen
    assert call(agents[0], "w1") == 2


def test_two_that_ask_for_one_name_at_once(elastic):
    def join(_):
        try:
            return elastic.join("one").worker_info.name
        except rpc.RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        found = sorted(pool.map(join, range(3)))
    assert found[0] == "one"
    assert all("worker name one is not unique" in text for text in found[1:])


def test_a_worker_with_a_world_size(elastic):
    elastic.join("w0", 0)
    with pytest.raises(rpc.RendezvousError, match="RPC group mixes statically and dynamically"):
        elastic.join("w1", 1, world_size=2, restarts=0)


def test_a_worker_with_another_secret(elastic):
    elastic.join("w0", 0)
    with pytest.raises(rpc.AuthenticationError, match="ZRPC_SECRET"):
        elastic.join("w1", 1, secret=ClusterSecret("another" * 8))


def test_a_worker_that_nobody_can_reach(elastic):
    first = elastic.join("first", 0)
    with pytest.raises(rpc.RpcError, match="listens on no network: set ZRPC_IFACE"):
        elastic.join("deaf", 1, options={"transport": "tcp"})
    assert call(first, "first") == 2
    assert elastic.join("second", 1).worker_info.name == "second"


def test_a_worker_that_a_member_does_not_trust(elastic, monkeypatch, caplog):
    """Its directory is one that others can write to, say."""
    first = elastic.join("first", 0)
    layer = first.layers[-1]

    def refuse(card):
        layer._news.post(
            Item(Verb.GONE, card.token, why=Departure.REFUSED, text="an open directory")
        )
        return ""

    monkeypatch.setattr(layer, "_endpoint_of", refuse)
    with pytest.raises(rpc.AuthenticationError, match="no member of its mesh any more: an open"):
        elastic.join("second", 1)
    with first.as_current(), pytest.raises(rpc.RpcError, match="could not find destination"):
        rpc.rpc_sync("second", max, (1, 2))


def test_a_member_that_answers_nobody_is_waited_for_in_vain(elastic, monkeypatch):
    """Its heartbeats are answered, so it may be busy; a join has its own limit."""
    first = elastic.join("first", 0)
    monkeypatch.setattr(first.layers[-1], "_look", lambda: None)
    with pytest.raises(rpc.RendezvousError, match=r"within 1 s.*\[WorkerInfo\(id=0, name=first"):
        elastic.join("second", 1, options={"init_timeout": 1.0})


def test_what_a_dead_mesh_has_left_in_the_store(elastic):
    """As in a file: those who were killed have said no farewell."""
    old = elastic.join_all(2)
    for agent in old:
        agent.layers[-1]._say_farewell = lambda: None
        agent.close()
    new = elastic.join_all(2)
    assert call(new[0], "w1") == 2
    assert {agent.worker_info.incarnation for agent in new} == {1}


def test_the_store_goes_and_the_mesh_goes_on(elastic, until, caplog):
    agents = elastic.join_all(2)

    def fail():
        raise dist.DistNetworkError("the host is gone")

    agents[0].layers[-1]._news.read = fail
    until(lambda: "no worker can join it any more" in caplog.text, "it says so")
    assert call(agents[0], "w1") == call(agents[1], "w0") == 2
    agents[0].shutdown()
    with agents[1].as_current(), pytest.raises(rpc.WorkerDied, match="it left the mesh"):
        rpc.rpc_sync("w0", max, (1, 2))


def test_a_reference_to_what_a_worker_owned_that_was_gone_before(elastic, monkeypatch):
    """So long before that nobody tells the new worker of it."""
    monkeypatch.setattr("zrpc.roster._REMEMBERED", 0)
    monkeypatch.setattr("zrpc.horizon._LENGTH", 0)
    first, owner = elastic.join_all(2)
    with first.as_current():
        kept = rpc.remote("w1", dict)
        assert kept.to_here() == {}
    number = owner.membership.rank
    owner.shutdown(graceful=False)
    for name in ("between", "late"):
        late = elastic.join(name)
    assert number not in late.membership.infos
    with first.as_current():
        for use in (lambda ref: ref.to_here(), lambda ref: ref.rpc_sync().keys()):
            with pytest.raises(rpc.OwnerDied, match=r"worker departed \(rank 1\) is gone: it left"):
                rpc.rpc_sync("late", use, (kept,))
        assert rpc.rpc_sync("late", lambda ref: ref.owner().id, (kept,)) == 1
    assert call(late, "w0") == 2


def test_a_reference_to_what_nobody_owns(elastic):
    first, _ = elastic.join_all(2)
    with first.as_current():
        kept = rpc.remote("w1", dict)
        assert kept.to_here() == {}
        nobody = first.membership.infos[77] = rpc.WorkerInfo("nobody", 77)
        kept._owner = nobody
        with pytest.raises(rpc.ProtocolError, match="expected the number of a worker, found 77"):
            rpc.rpc_sync("w1", id, (kept,))
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
