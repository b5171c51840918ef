"""Workers that join a running mesh, and the errors that they can get."""

from __future__ import annotations

import itertools
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import zrpc as rpc
from tests.services.elastic.calls import PATIENCE, call
from tests.services.elastic.conftest import Elastic
from tests.support.hosts import on_hosts
from tests.support.stores import RecordingStore
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.membership.endpoints import endpoint_of
from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.view import Membership
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.transport.curve import supports_curve

pytestmark = pytest.mark.system


def test_a_worker_that_joins_is_known_to_all_at_once(elastic: Elastic) -> None:
    """It gets the first free rank."""
    first, second = elastic.join_all(2)
    joined = []
    with first.as_current():
        rpc.on_worker_joined(lambda worker: joined.append(worker.name))
    third = elastic.join("late")
    assert third.worker_info == rpc.WorkerInfo("late", 2)
    for agent in (first, second, third):
        assert call(agent, "late", rpc.get_worker_info, ()) == third.worker_info
        assert agent.get_worker_infos() == [each.worker_info for each in (first, second, third)]
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


def test_one_that_leaves_at_once_does_not_keep_others_from_coming_in(elastic: Elastic) -> None:
    elastic.world_size = 4
    leaves = threading.Event()

    def join(rank: int) -> Agent:
        agent = elastic.join(f"w{rank}", rank, restarts=0)
        if not leaves.is_set():  # the first that is in
            leaves.set()
            agent.close()
        return agent

    for _ in range(5):
        elastic.store = dist.HashStore()
        leaves.clear()
        with ThreadPoolExecutor(4) as pool:
            agents = list(pool.map(join, range(4)))
        for agent in agents:
            agent.close()


def test_rank_0_is_kept_for_the_host_of_the_store(elastic: Elastic) -> None:
    """A worker without a rank may find the store before its host has its rank."""
    by_host = {"init_method": "tcp://127.0.0.1:29500"}
    assert elastic.join("guest", **by_host).worker_info.id == 1
    host = elastic.join("host", 0, **by_host)
    assert call(host, "guest") == 2


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
    with tempfile.TemporaryDirectory(prefix="zrpc-test-") as directory:
        monkeypatch.setenv("ZRPC_RUNTIME_DIR", directory)
        with monkeypatch.context() as far:
            far.setattr("zrpc.bootstrap.network_key", lambda: "another/network")
            with pytest.raises(rpc.RpcError, match="listens on no network: set ZRPC_IFACE"):
                elastic.join("far", 1)
        assert call(first, "first") == 2
        second = elastic.join("near", 1)
        assert not first.membership.shares_host(second.membership.own_id)
        assert (call(first, "near"), call(second, "first")) == (2, 2)
        elastic.close()


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


def test_a_worker_that_does_not_fit(elastic: Elastic) -> None:
    elastic.join("w0", 0)
    with pytest.raises(rpc.RendezvousError, match="RPC group mixes statically and dynamically"):
        elastic.join("w1", 1, world_size=2, restarts=0)
    with pytest.raises(rpc.AuthenticationError, match="ZRPC_SECRET"):
        elastic.join("w1", 1, secret=ClusterSecret("another" * 8))


def test_a_worker_that_a_member_does_not_trust(
    elastic: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, others can write to its directory."""
    first = elastic.join("first", 0)

    def refuse(membership: Membership, record: PeerRecord) -> str:
        if membership is first.membership:
            raise rpc.AuthenticationError("an open directory")
        return endpoint_of(membership, record)

    monkeypatch.setattr("zrpc.services.elastic.follower.endpoint_of", refuse)
    with pytest.raises(rpc.AuthenticationError, match="no longer a member of its mesh: an open"):
        elastic.join("second", 1)
    with pytest.raises(rpc.RpcError, match="could not find destination"):
        call(first, "second")


def test_a_join_times_out_if_a_member_does_not_answer(elastic: Elastic) -> None:
    """Its heartbeats are answered, so it may be busy; a join has its own limit."""
    first, held = elastic.join("first", 0), threading.Event()
    first.receiver.in_io_thread(lambda: held.wait(PATIENCE))
    with pytest.raises(rpc.RendezvousError, match=r"within 1 s.*\[WorkerInfo\(id=0, name=first"):
        elastic.join("second", 1, options={"init_timeout": 1.0})
    held.set()


def test_entries_of_a_dead_mesh_are_ignored(elastic: Elastic) -> None:
    """As in a file: workers that were killed have not announced that they left."""
    old = elastic.join_all(2)
    for agent in old:
        elastic.crash(agent)
    new = elastic.join_all(2)
    assert call(new[0], "w1") == 2
    assert {agent.worker_info.incarnation for agent in new} == {1}


class HostedStore(RecordingStore):
    """A store whose host may exit."""

    host_exits = False

    def step(self) -> None:
        if self.host_exits:
            raise dist.DistNetworkError("the host is gone")


def test_the_mesh_goes_on_without_its_store(
    elastic: Elastic, caplog: pytest.LogCaptureFixture
) -> None:
    elastic.store = HostedStore()
    agents = elastic.join_all(2)
    elastic.store.host_exits = True
    until(lambda: caplog.text.count("workers can no longer join it") == 2, "both log that")
    assert call(agents[0], "w1") == call(agents[1], "w0") == 2
    agents[0].shutdown()
    with pytest.raises(rpc.WorkerDied, match="it left the mesh"):
        call(agents[1], "w0")


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


# -- names of actors ----------------------------------------------------------------------------


def make(agent: Agent, name: str, value: object, **more: Any) -> Any:
    with agent.as_current():
        to = agent.worker_info
        rref = rpc.remote(to, dict, kwargs={"value": value}, name=name, **more)
        return rref.rpc_sync().get("value")


def get(agent: Agent, name: str) -> Any:
    with agent.as_current():
        return rpc.get_actor(name, 20).rpc_sync().get("value")


def test_a_worker_that_joins_with_a_lower_rank_finds_the_names(elastic: Elastic) -> None:
    first, second = elastic.join("w5", 5), elastic.join("w6", 6)
    make(second, "a", 1)
    third = elastic.join("w0", 0)
    assert [get(agent, "a") for agent in (first, second, third)] == [1, 1, 1]
    with pytest.raises(rpc.RpcError, match="'a' is taken by dict on w6"):
        make(third, "a", 2)
    elastic.agents.remove(first)
    first.close()  # has granted it
    assert get(third, "a") == 1
    make(third, "b", 3)
    assert get(second, "b") == 3


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
