"""A worker that is restarted under its name and rank is never mistaken for its predecessor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.services.elastic.slow_handler import PATIENCE, entered, finish, slow
from tests.support.pending import entered_call
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.optim import DistributedOptimizer, clip_grad_norm_
from zrpc.services.autograd.service import AutogradService
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.services.rref.service import RRefService
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import member_id_of
from zrpc.wire.message import Message

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system

SIZE = 3


@pytest.fixture
def workers(elastic: Elastic) -> list[Agent]:
    elastic.world_size = SIZE
    return elastic.join_all(SIZE, restarts=0)


@pytest.fixture
def restart(elastic: Elastic, workers: list[Agent]) -> Callable[..., Agent]:
    """Restarts worker 1 while the old one is still there, as if nobody had noticed its exit."""

    def restart(count: int = 1) -> Agent:
        workers[1] = elastic.join("w1", 1, restarts=count)
        return workers[1]

    return restart


def test_a_restarted_worker_can_be_called_at_once_by_all(
    workers: list[Agent], restart: Callable[..., Agent]
) -> None:
    lost, joined = [], []
    with workers[0].as_current():
        rpc.on_worker_lost(lambda worker: lost.append((worker.name, worker.incarnation)))
        rpc.on_worker_joined(lambda worker: joined.append((worker.name, worker.incarnation)))
        info = rpc.get_worker_info("w1")
    new = restart()
    for to in ("w1", 1, info):  # each destination that named the old one now names the new one
        for agent in (workers[0], workers[2]):
            with agent.as_current():
                assert rpc.rpc_sync(to, lambda: rpc.get_worker_info().incarnation) == 1
    with new.as_current():
        assert rpc.rpc_sync("w0", lambda: rpc.get_worker_info("w1").incarnation) == 1
        assert rpc.rpc_sync("w2", max, (1, 2)) == 2
    until(lambda: lost == [("w1", 0)], "the hook for its loss is called")
    until(lambda: sorted(joined) == [("w1", 0), ("w1", 1), ("w2", 0)], "the other hook is called")
    assert joined[-1] == ("w1", 1)
    for count in (2, 3):
        assert restart(count).worker_info.incarnation == count
        with workers[2].as_current():
            assert rpc.rpc_sync("w1", lambda: rpc.get_worker_info().incarnation) == count


def test_an_outstanding_call_fails(workers: list[Agent], restart: Callable[..., Agent]) -> None:

    with workers[0].as_current():
        future = rpc.rpc_async("w1", slow)
    assert entered.wait(PATIENCE)
    restart()
    with pytest.raises(rpc.WorkerDied, match=r"w1 \(rank 1\) is gone: it has ended, and was st"):
        future.wait()
    finish.set()


def test_a_caller_that_reads_the_log_late_is_told_nothing_else(elastic: Elastic) -> None:
    """The worker that was replaced reads of it first."""
    seldom = ElasticLimits(poll_seconds=0.8, awaiting_poll_seconds=0.8)
    caller = elastic.join("w0", 0, elastic_limits=seldom)
    elastic.join("w1", 1, restarts=0)
    with caller.as_current():
        future = rpc.rpc_async("w1", slow)
    assert entered.wait(PATIENCE)
    elastic.join("w1", 1, restarts=1)
    with pytest.raises(rpc.WorkerDied, match="it has ended, and was started again"):
        future.wait()
    finish.set()


def test_references_of_two_incarnations_differ(
    workers: list[Agent], restart: Callable[..., Agent]
) -> None:
    with workers[0].as_current():
        old = rpc.remote("w1", dict, (), {"of": "old"})
        assert old.to_here() == {"of": "old"}
    new = restart()
    with workers[0].as_current():
        fresh = rpc.remote("w1", dict, (), {"of": "new"})
        assert fresh.to_here() == {"of": "new"}
        assert fresh != old
        assert fresh.owner() == old.owner()
        with pytest.raises(rpc.OwnerDied, match="w1"):
            DistributedOptimizer(torch.optim.SGD, [old, fresh], lr=0.1)
        with dist_autograd.context() as context, pytest.raises(rpc.OwnerDied, match="w1"):
            clip_grad_norm_(context, [old, fresh], 1.0)
        uses = (
            old.to_here,
            old.local_value,
            lambda: old.rpc_sync().get("of"),
            lambda: old.remote().get("of"),
        )
        for use in uses:
            with pytest.raises(rpc.OwnerDied, match="w1"):
                use()
        # Nor if another worker uses it, or the new worker itself, which has never heard of it.
        for to in ("w2", "w1"):
            for there in (rpc.RRef.to_here, rpc.RRef.local_value):
                with pytest.raises(rpc.OwnerDied, match="w1"):
                    rpc.rpc_sync(to, there, (old,))
    # A value that the old one asked for, and one that the new one does.
    with new.as_current():
        theirs = [rpc.remote("w0", int, (i,)) for i in range(3)]
        assert [ref.to_here() for ref in theirs] == [0, 1, 2]
        assert "created_on=1, incarnation=1, local_id=0" in str(theirs[0])


def test_ids_of_two_incarnations_differ(
    workers: list[Agent], restart: Callable[..., Agent]
) -> None:
    def drawn(agent: Agent) -> tuple[Any, int]:
        rref_id = agent.service(RRefService).new_id()
        with agent.as_current(), dist_autograd.context() as context_id:
            return rref_id, context_id

    old = drawn(workers[1])
    new = drawn(restart())
    assert (old[0].created_on, new[0].created_on) == (1, member_id_of(1, 1))
    assert old[0] != new[0]
    assert old[1] != new[1]
    assert old[1] >> 48 == new[1] >> 48 == 1


def test_messages_of_the_old_process_are_dropped(
    workers: list[Agent], restart: Callable[..., Agent]
) -> None:
    """Here it goes on, as after a network was cut."""
    old = workers[1]
    with old.as_current():
        assert rpc.rpc_sync("w0", max, (1, 2)) == 2
    new = restart()
    with old.as_current(), pytest.raises(rpc.WorkerDied):
        rpc.rpc_sync("w0", max, (1, 2))
    assert 1 not in workers[0].dispatcher.received
    with workers[0].as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    # Its answer to a call, and its announcement that it leaves, are dropped.
    call = entered_call(workers[0].caller.calls, new.membership.own_id, 0)
    old.membership.lost.discard(0)
    old.outbox.post(0, Message(Kind.RESULT, call.call_id))
    old.outbox.post(0, Message(Kind.LEAVE))
    with workers[0].as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    assert not call.settled
    call.fail(RuntimeError("the test ends"))


def test_a_context_with_the_old_incarnation_fails_and_new_ones_do_not(
    workers: list[Agent], restart: Callable[..., Agent]
) -> None:
    def loss_of(weight: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync("w1", torch.mul, (weight, 2)).sum()

    with workers[0].as_current():
        weight = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = loss_of(weight)
            restart()
            with pytest.raises(rpc.WorkerDied, match="w1"):
                dist_autograd.backward(context_id, [loss])
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_of(weight)])
            assert dist_autograd.get_gradients(context_id)[weight].tolist() == [2, 2]
    for agent in (workers[0], workers[2]):
        assert len(agent.service(AutogradService)) == 0


def test_a_worker_that_joins_while_the_others_shut_down_is_waited_for(
    elastic: Elastic, workers: list[Agent]
) -> None:
    first = threading.Thread(target=workers[0].shutdown)
    first.start()
    for count in (1, 2):
        with workers[1].as_current():
            rpc.rpc_sync("w0", max, (1, 2))  # they count what they have exchanged
        workers[1] = elastic.join("w1", 1, restarts=count)
    first.join(0.2)
    assert first.is_alive()
    others = [threading.Thread(target=agent.shutdown) for agent in workers[1:]]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_worker_that_fails_before_the_mesh_is_complete(elastic: Elastic) -> None:
    elastic.world_size = 2
    with pytest.raises(rpc.RendezvousError, match="rank 0 is missing"):
        elastic.join("w1", 1, restarts=0, options={"init_timeout": 0.2})
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(elastic.join, f"w{i}", i, restarts=i) for i in range(2)]
        first, second = (future.result() for future in found)
    assert (first.worker_info.incarnation, second.worker_info.incarnation) == (0, 1)
    with first.as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2


def test_a_worker_that_comes_back_after_the_others_have_left(
    elastic: Elastic, workers: list[Agent]
) -> None:
    elastic.limits = ElasticLimits(return_seconds=0.2)
    elastic.crash(workers[1])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda agent: agent.shutdown(), (workers[0], workers[2])))
    with pytest.raises(
        rpc.RendezvousError, match=r"has ended while this worker was restarted: .*w0"
    ):
        elastic.join("w1", 1, restarts=1)
    with pytest.raises(rpc.RendezvousError, match="has ended while this worker was restarted"):
        elastic.join("w1", 1, restarts=2)
