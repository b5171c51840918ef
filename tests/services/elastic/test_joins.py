"""Workers that join a running mesh, and the errors that they can get."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

import zrpc as rpc
from tests.support.hosts import on_hosts
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.secret import ClusterSecret
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.services.elastic.state import MembershipEvent, Verb
from zrpc.transport.address import host_key, network_key
from zrpc.transport.curve import supports_curve

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system


def names_of(agent: Agent, register: Callable[..., object]) -> list[str]:
    """Returns a list of the names that hooks are called with, which grows as they are."""
    names = []
    with agent.as_current():
        register(lambda worker: names.append(worker.name))
    return names


def call(
    agent: Agent, to: str | int, function: Callable[..., Any] = max, args: tuple[Any, ...] = (1, 2)
) -> Any:
    with agent.as_current():
        return rpc.rpc_sync(to, function, args)


def test_a_worker_that_joins_is_known_to_all_at_once(elastic: Elastic) -> None:
    """It gets the first free rank."""
    first, second = elastic.join_all(2)
    joined = names_of(first, rpc.on_worker_joined)
    third = elastic.join("late")
    assert third.worker_info == rpc.WorkerInfo("late", 2)
    for agent in (first, second, third):
        assert call(agent, "late", rpc.get_worker_info, ()) == third.worker_info
        assert agent.get_worker_infos() == [rpc.WorkerInfo(f"w{i}", i) for i in (0, 1)] + [
            third.worker_info
        ]
        assert call(third, agent.worker_info.name) == call(third, agent.worker_info.id) == 2
    until(lambda: joined == ["w1", "late"], "the hook is called")


def test_many_join_at_once(elastic: Elastic) -> None:
    """One of them has chosen its rank."""
    chosen = elastic.join("w3", 3)
    with ThreadPoolExecutor(7) as pool:
        agents = list(pool.map(lambda i: elastic.join(f"w{i}"), [0, 1, 2, 4, 5, 6, 7]))
    for agent in (chosen, *agents):
        infos = agent.get_worker_infos()
        assert [info.id for info in infos] == list(range(8))
        assert sorted(info.name for info in infos) == [f"w{i}" for i in range(8)]


def test_rank_0_is_kept_for_the_host_of_the_store(elastic: Elastic) -> None:
    """A worker without a rank may find the store before its host has its rank."""
    by_host = {"init_method": "tcp://127.0.0.1:29500"}
    assert elastic.join("guest", **by_host).worker_info.id == 1
    host = elastic.join("host", 0, **by_host)
    assert call(host, "guest") == 2


def test_joins_and_leaves_under_load(elastic: Elastic) -> None:
    steady = elastic.join_all(2)
    stop = threading.Event()
    errors = []

    def call_all(agent: Agent) -> None:
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
def test_members_by_tcp_admit_each_other_as_they_join(elastic: Elastic) -> None:
    elastic.options["transport"] = "tcp"
    first = elastic.join("first", 0)
    second = elastic.join("second", 1)
    assert (call(first, "second"), call(second, "first")) == (2, 2)
    key = second.membership.records[1].public_key.encode()
    assert first.network._curve.name_of(key)
    second.shutdown()
    until(lambda: not first.network._curve.name_of(key), "its key is no member's")
    third = elastic.join("third", 1)
    assert (call(first, "third"), call(third, "first")) == (2, 2)


def test_workers_without_a_shared_directory_use_the_named_interface(
    elastic: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRPC_IFACE", "127.0.0.1")
    first = elastic.join("first", 0)
    monkeypatch.setattr("zrpc.bootstrap.host_key", lambda *_: "another/directory")
    monkeypatch.setattr("zrpc.bootstrap.network_key", lambda: "another/network")
    with pytest.raises(rpc.RpcError, match="listens on no network: set ZRPC_IFACE"):
        elastic.join("far", 1)  # on another host, by its key
    monkeypatch.setattr("zrpc.bootstrap.network_key", network_key)
    monkeypatch.setattr(
        "zrpc.bootstrap.host_key", lambda *_: f"{host_key().split('/')[0]}/elsewhere"
    )
    second = elastic.join("near", 1)
    assert not first.membership.shares_host(second.membership.own_id)
    assert (call(first, "near"), call(second, "first")) == (2, 2)


# -- errors ----------------------------------------------------------------------------------


def test_a_name_or_a_rank_that_is_taken(elastic: Elastic) -> None:
    elastic.limits = ElasticLimits(death_report_seconds=15.0)
    agents = elastic.join_all(2)
    began = time.monotonic()
    for name, rank in (("w1", 7), ("w1", None), ("other", 1)):
        what = "rank 1" if name == "other" else "worker name w1"
        words = rf"{what} is not unique: worker w1 \(rank 1\)"
        with pytest.raises(rpc.RendezvousError, match=words):
            elastic.join(name, rank)
    assert time.monotonic() - began < 10  # it can see that the other is alive
    assert call(agents[0], "w1") == 2


def test_workers_that_ask_for_one_name_at_once(elastic: Elastic) -> None:
    def join(_: int) -> str:
        try:
            return elastic.join("one").worker_info.name
        except rpc.RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        found = sorted(pool.map(join, range(3)))
    assert found[0] == "one"
    assert all("worker name one is not unique" in text for text in found[1:])


def test_a_worker_that_does_not_fit(elastic: Elastic) -> None:
    elastic.join("w0", 0)
    with pytest.raises(rpc.RendezvousError, match="RPC group mixes statically and dynamically"):
        elastic.join("w1", 1, world_size=2, restarts=0)
    with pytest.raises(rpc.AuthenticationError, match="ZRPC_SECRET"):
        elastic.join("w1", 1, secret=ClusterSecret("another" * 8))


def test_a_worker_that_no_member_can_reach(elastic: Elastic) -> None:
    first = elastic.join("first", 0)
    with pytest.raises(rpc.RpcError, match="listens on no network: set ZRPC_IFACE"):
        elastic.join("deaf", 1, options={"transport": "tcp"})
    assert call(first, "first") == 2
    assert elastic.join("second", 1).worker_info.name == "second"


def test_a_worker_that_a_member_does_not_trust(
    elastic: Elastic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, others can write to its directory."""
    first = elastic.join("first", 0)
    follower = first.services[-1].follower

    def refuse(record: PeerRecord) -> str:
        follower._log.append(
            MembershipEvent(Verb.GONE, record.token, why=Reason.REFUSED, text="an open directory")
        )
        return ""

    monkeypatch.setattr(follower, "_endpoint_of", refuse)
    with pytest.raises(rpc.AuthenticationError, match="no longer a member of its mesh: an open"):
        elastic.join("second", 1)
    with first.as_current(), pytest.raises(rpc.RpcError, match="could not find destination"):
        rpc.rpc_sync("second", max, (1, 2))


def test_a_join_times_out_if_a_member_does_not_answer(
    elastic: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats are answered, so it may be busy; a join has its own limit."""
    first = elastic.join("first", 0)
    monkeypatch.setattr(first.services[-1].follower, "_follow", lambda: None)
    with pytest.raises(rpc.RendezvousError, match=r"within 1 s.*\[WorkerInfo\(id=0, name=first"):
        elastic.join("second", 1, options={"init_timeout": 1.0})


def test_entries_of_a_dead_mesh_are_ignored(elastic: Elastic) -> None:
    """As in a file: workers that were killed have not announced that they left."""
    old = elastic.join_all(2)
    for agent in old:
        elastic.crash(agent)
    new = elastic.join_all(2)
    assert call(new[0], "w1") == 2
    assert {agent.worker_info.incarnation for agent in new} == {1}


def test_the_mesh_goes_on_without_its_store(
    elastic: Elastic, caplog: pytest.LogCaptureFixture
) -> None:
    agents = elastic.join_all(2)

    def fail() -> None:
        raise dist.DistNetworkError("the host is gone")

    agents[0].services[-1].follower._log.read = fail
    until(lambda: "workers can no longer join it" in caplog.text, "it logs that")
    assert call(agents[0], "w1") == call(agents[1], "w0") == 2
    agents[0].shutdown()
    with agents[1].as_current(), pytest.raises(rpc.WorkerDied, match="it left the mesh"):
        rpc.rpc_sync("w0", max, (1, 2))


def test_a_reference_to_a_value_of_a_worker_that_left_before_this_one_joined(
    elastic: Elastic,
) -> None:
    """So long before that the new worker is never told of it."""
    elastic.limits = ElasticLimits(remembered=0, snapshot_events=0)
    first, owner = elastic.join_all(2)
    with first.as_current():
        kept = rpc.remote("w1", dict)
        assert kept.to_here() == {}
    number = owner.membership.own_id
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
    nobody = first.membership.infos[77] = rpc.WorkerInfo("nobody", 77)
    with first.as_current():
        kept._owner = nobody
        with pytest.raises(rpc.ProtocolError, match="expected the id of a member, found 77"):
            rpc.rpc_sync("late", id, (kept,))
        assert rpc.rpc_sync("late", max, (1, 2)) == 2


# -- at the port of a worker that has died --------------------------------------------------------


@pytest.fixture
def port(elastic: Elastic, monkeypatch: pytest.MonkeyPatch) -> str:
    """A port; all workers use tcp, and none sees another's directory: each is in a container."""
    on_hosts(monkeypatch, itertools.count())
    elastic.options |= {"transport": "tcp", "heartbeat_timeout": 2.0}
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_a_worker_that_comes_back_alone_at_its_port(elastic: Elastic, port: str) -> None:
    """It does not take itself for the one that had its name."""
    elastic.crash(elastic.join("worker", options={"port_range": port}))
    again = elastic.join("worker", options={"port_range": port})
    assert call(again, "worker") == 2


def test_a_worker_at_the_port_of_one_whose_end_nobody_has_noticed(
    elastic: Elastic, port: str
) -> None:
    first = elastic.join("first")
    dead = elastic.join("dead", options={"port_range": port})
    assert call(first, "dead") == call(dead, "first") == 2
    number = dead.membership.own_id
    until(lambda: first.liveness.silence(number) == 0.0, "its heartbeats are answered")
    # The first worker is held up while the second one ends and the third one comes.
    held_up = threading.Event()
    tick = first.liveness.tick
    first.liveness.tick = lambda everyone: [] if held_up.is_set() else tick(everyone)
    held_up.set()
    elastic.crash(dead)
    next_one = elastic.join("next", options={"port_range": port})
    assert next_one.network.tcp_endpoint.endswith(f":{port}")
    held_up.clear()
    assert call(first, "next") == call(next_one, "first") == 2
    until(lambda: number in first.membership.lost, "the second one's end is noticed")
    assert first.liveness.reason(number) is Reason.ENDED
    third = next_one.membership.own_id
    until(lambda: first.liveness.silence(third) == 0.0, "its heartbeats are answered")
    assert call(first, "next") == 2
    elastic.crash(next_one)
    until(lambda: third in first.membership.lost, "the third one's end is noticed")
