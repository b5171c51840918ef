"""A worker that is restarted under its name and rank is never mistaken for its predecessor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.services.elastic.calls import PATIENCE, call, entered, finish, slow
from tests.services.elastic.conftest import Crew, Elastic
from tests.support.pending import entered_call
from tests.support.waiting import pending, until
from zrpc.optim import DistributedOptimizer, clip_grad_norm_
from zrpc.services.autograd.service import AutogradService
from zrpc.services.elastic.limits import ElasticLimits
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

pytestmark = pytest.mark.system


def test_a_restarted_worker_can_be_called_at_once_by_all(workers: Crew) -> None:
    lost, joined = [], []
    with workers[0].as_current():
        rpc.on_worker_lost(lambda worker: lost.append((worker.name, worker.incarnation)))
        rpc.on_worker_joined(lambda worker: joined.append((worker.name, worker.incarnation)))
        info = rpc.get_worker_info("w1")
    new = workers.revive()
    for to in ("w1", 1, info):  # each destination that named the old one now names the new one
        for agent in (workers[0], workers[2]):
            assert call(agent, to, lambda: rpc.get_worker_info().incarnation, ()) == 1
    assert call(new, "w0", lambda: rpc.get_worker_info("w1").incarnation, ()) == 1
    assert call(new, "w2") == 2
    until(lambda: lost == [("w1", 0)], "the hook for its loss is called")
    until(lambda: sorted(joined) == [("w1", 0), ("w1", 1), ("w2", 0)], "the other hook is called")
    assert joined[-1] == ("w1", 1)
    for count in (2, 3):
        assert workers.revive(count=count).worker_info.incarnation == count
        assert call(workers[2], "w1", lambda: rpc.get_worker_info().incarnation, ()) == count


def test_an_outstanding_call_fails_even_if_its_caller_reads_the_log_late(elastic: Elastic) -> None:
    """The worker that was replaced reads of it first."""
    seldom = ElasticLimits(poll_seconds=0.8, awaiting_poll_seconds=0.8)
    caller = elastic.join("w0", 0, elastic_limits=seldom)
    elastic.join("w1", 1, restarts=0)
    with caller.as_current():
        future = rpc.rpc_async("w1", slow)
    assert entered.wait(PATIENCE)
    elastic.join("w1", 1, restarts=1)
    ended = r"w1 \(rank 1\) is gone: it has ended, and was started again"
    with pytest.raises(rpc.WorkerDied, match=ended):
        future.wait()
    finish.set()


def test_references_of_two_incarnations_differ(workers: Crew) -> None:
    with workers[0].as_current():
        old = rpc.remote("w1", dict, (), {"of": "old"})
        assert old.to_here() == {"of": "old"}
    with workers[1].as_current(), dist_autograd.context() as context_id:
        old_context_id = context_id
    new = workers.revive()
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
        with dist_autograd.context() as context_id:
            assert context_id != old_context_id
            assert context_id >> 48 == old_context_id >> 48 == 1


def test_messages_of_the_old_process_are_dropped(workers: Crew) -> None:
    """Here it goes on, as after a network was cut."""
    old = workers[1]
    assert call(old, "w0") == 2
    new = workers.revive()
    with pytest.raises(rpc.WorkerDied):
        call(old, "w0")
    assert 1 not in workers[0].dispatcher.received
    assert call(workers[0], "w1") == 2
    # Its answer to a call, and its announcement that it leaves, are dropped.
    outstanding = entered_call(workers[0].caller.calls, new.membership.own_id, 0)
    old.membership.lost.discard(0)
    old.outbox.post(0, Message(Kind.RESULT, outstanding.call_id))
    old.outbox.post(0, Message(Kind.LEAVE))
    assert call(workers[0], "w1") == 2
    assert not outstanding.settled
    outstanding.fail(RuntimeError("the test ends"))


def test_a_context_with_the_old_incarnation_fails_and_new_ones_do_not(workers: Crew) -> None:
    def loss_of(weight: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync("w1", torch.mul, (weight, 2)).sum()

    with workers[0].as_current():
        weight = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = loss_of(weight)
            workers.revive()
            with pytest.raises(rpc.WorkerDied, match="w1"):
                dist_autograd.backward(context_id, [loss])
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_of(weight)])
            assert dist_autograd.get_gradients(context_id)[weight].tolist() == [2, 2]
    for agent in (workers[0], workers[2]):
        assert len(agent.service(AutogradService)) == 0


def test_a_worker_that_joins_while_the_others_shut_down_is_waited_for(
    elastic: Elastic, workers: Crew
) -> None:
    first = elastic.leave(workers[0])
    for count in (1, 2):
        call(workers[1], "w0")  # they count what they have exchanged
        workers.revive(count=count)
    assert pending(first, 0.2)
    for leaves in (first, *map(elastic.leave, workers[1:])):
        leaves.result(PATIENCE)


@pytest.mark.parametrize("timeout", [0.2, 1e-6], ids=["in time to join", "too late to join"])
def test_a_worker_that_fails_before_the_mesh_is_complete(elastic: Elastic, timeout: float) -> None:
    elastic.world_size = 2
    with pytest.raises(rpc.RendezvousError, match="rank 0 is missing"):
        elastic.join("w1", 1, restarts=0, options={"init_timeout": timeout})
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(elastic.join, f"w{i}", i, restarts=i) for i in range(2)]
        first, second = (future.result() for future in found)
    assert (first.worker_info.incarnation, second.worker_info.incarnation) == (0, 1)
    assert call(first, "w1") == 2


def test_a_worker_that_comes_back_after_the_others_have_left(
    elastic: Elastic, workers: Crew
) -> None:
    elastic.limits = ElasticLimits(return_seconds=0.2)
    elastic.crash(workers[1])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda agent: agent.shutdown(), (workers[0], workers[2])))
    for count in (1, 2):
        ended = r"has ended while this worker was restarted: .*w0"
        with pytest.raises(rpc.RendezvousError, match=ended):
            elastic.join("w1", 1, restarts=count)
