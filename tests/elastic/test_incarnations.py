"""A worker that is started again under its name and rank is never mistaken for its predecessor."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from slow_handler import PATIENCE, entered, finish, slow

import zrpc as rpc
import zrpc.autograd as dist_autograd
from zrpc.autograd.layer import AutogradLayer
from zrpc.rref.layer import RRefLayer
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind
from zrpc.worker_info import number_of

SIZE = 3


@pytest.fixture
def workers(elastic):
    elastic.world_size = SIZE
    return elastic.join_all(SIZE, restarts=0)


@pytest.fixture
def restart(elastic, workers):
    """Starts worker 1 again while the old one is still there, as if nobody had noticed its end."""

    def restart(count=1):
        workers[1] = elastic.join("w1", 1, restarts=count)
        return workers[1]

    return restart


def test_it_can_be_called_at_once_by_all(workers, restart, until):
    lost, joined = [], []
    with workers[0].as_current():
        rpc.on_worker_lost(lambda worker: lost.append((worker.name, worker.incarnation)))
        rpc.on_worker_joined(lambda worker: joined.append((worker.name, worker.incarnation)))
        info = rpc.get_worker_info("w1")
    new = restart()
    for to in ("w1", 1, info):  # whatever names it now names the new one
        for agent in (workers[0], workers[2]):
            with agent.as_current():
                assert rpc.rpc_sync(to, lambda: rpc.get_worker_info().incarnation) == 1
    with new.as_current():
        assert rpc.rpc_sync("w0", lambda: rpc.get_worker_info("w1").incarnation) == 1
        assert rpc.rpc_sync("w2", max, (1, 2)) == 2
    until(lambda: lost == [("w1", 0)], "its loss is told")
    until(lambda: sorted(joined) == [("w1", 0), ("w1", 1), ("w2", 0)], "its return is told")
    assert joined[-1] == ("w1", 1)


def test_a_call_that_is_under_way_fails(workers, restart):

    with workers[0].as_current():
        future = rpc.rpc_async("w1", slow)
    assert entered.wait(PATIENCE)
    restart()
    with pytest.raises(rpc.WorkerDied, match=r"w1 \(rank 1\) is gone: it has ended, and was st"):
        future.wait()
    finish.set()


def test_its_references_are_not_the_old_ones(workers, restart):
    with workers[0].as_current():
        old = rpc.remote("w1", dict, (), {"of": "old"})
        assert old.to_here() == {"of": "old"}
    new = restart()
    with workers[0].as_current():
        fresh = rpc.remote("w1", dict, (), {"of": "new"})
        assert fresh.to_here() == {"of": "new"}
        assert fresh != old
        for use in (old.to_here, lambda: old.rpc_sync().get("of"), lambda: old.remote().get("of")):
            with pytest.raises(rpc.OwnerDied, match="w1"):
                use()
        # Nor where another uses it, or the new worker itself, which has never heard of it.
        for to in ("w2", "w1"):
            with pytest.raises(rpc.OwnerDied, match="w1"):
                rpc.rpc_sync(to, lambda ref: ref.to_here(), (old,))
    # A value that the old one asked for, and one that the new one does.
    with new.as_current():
        theirs = [rpc.remote("w0", int, (i,)) for i in range(3)]
        assert [ref.to_here() for ref in theirs] == [0, 1, 2]
        assert "created_on=1, incarnation=1, local_id=0" in repr(theirs[0])


def test_ids_of_the_same_count_differ(workers, restart):
    def drawn(agent):
        rref_id = agent.layer(RRefLayer).new_id()
        with agent.as_current(), dist_autograd.context() as context_id:
            return rref_id, context_id

    old = drawn(workers[1])
    new = drawn(restart())
    assert (old[0].created_on, new[0].created_on) == (1, number_of(1, 1))
    assert old[0] != new[0]
    assert old[1] != new[1]
    assert old[1] >> 48 == new[1] >> 48 == 1


def test_references_that_the_old_one_held_are_dropped(workers, restart, until):
    layer = workers[0].layer(RRefLayer)
    with workers[1].as_current():
        held = rpc.remote("w0", dict)
        assert held.to_here() == {}
    assert len(layer._values) == 1
    restart()
    until(lambda: not layer._values, "the value is free")
    del held


def test_what_the_old_process_still_sends_is_dropped(workers, restart, until):
    """Here it lives on, as after a network was cut."""
    old = workers[1]
    with old.as_current():
        assert rpc.rpc_sync("w0", max, (1, 2)) == 2
    new = restart()
    with old.as_current(), pytest.raises(rpc.WorkerDied):
        rpc.rpc_sync("w0", max, (1, 2))
    assert 1 not in workers[0].dispatcher.received
    with workers[0].as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    # Its answer to a call, and a word about a pass of its own, find nobody.
    call = workers[0].caller.calls.add(new.membership.rank, 0)
    old.membership.lost.discard(0)
    old.outbox.post(0, Message(Kind.RESULT, call.call_id))
    old.outbox.post(0, Message(Kind.LEAVE))
    with workers[0].as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    assert not call.settled
    call.give_up(RuntimeError("the test ends"))


def test_a_context_that_the_old_one_took_part_in_fails_and_new_ones_do_not(workers, restart):
    def loss_of(weight):
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
        assert len(agent.layer(AutogradLayer)) == 0


def test_contexts_of_the_old_one_end(workers, restart, until):
    layer = workers[0].layer(AutogradLayer)
    with workers[1].as_current(), dist_autograd.context():
        weight = torch.ones(2, requires_grad=True)
        rpc.rpc_sync("w0", torch.mul, (weight, 2))
        assert len(layer) == 1
        restart()
        until(lambda: len(layer) == 0, "the context is forgotten")


def test_again_and_again(workers, restart):
    for count in (1, 2, 3):
        new = restart(count)
        assert new.worker_info.incarnation == count
        with workers[2].as_current():
            assert rpc.rpc_sync("w1", lambda: rpc.get_worker_info().incarnation) == count


def test_all_shut_down_gracefully_with_the_new_one(workers, restart):
    with workers[1].as_current():
        rpc.rpc_sync("w0", max, (1, 2))
    restart()
    with workers[1].as_current():
        rpc.rpc_sync("w0", max, (1, 2))
    threads = [threading.Thread(target=agent.shutdown) for agent in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def test_one_that_comes_while_the_others_shut_down_is_waited_for(elastic, workers):
    first = threading.Thread(target=workers[0].shutdown)
    first.start()
    elastic.join("w1", 1, restarts=1).shutdown(graceful=False)
    new = elastic.join("w1", 1, restarts=2)
    first.join(0.2)
    assert first.is_alive()
    others = [threading.Thread(target=agent.shutdown) for agent in (new, workers[2])]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_worker_that_fails_before_the_mesh_is_complete(elastic):
    elastic.world_size = 2
    with pytest.raises(rpc.RendezvousError, match=r"ranks \[0\] are missing"):
        elastic.join("w1", 1, restarts=0, options={"init_timeout": 0.2})
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(elastic.join, f"w{i}", i, restarts=i) for i in range(2)]
        first, second = (future.result() for future in found)
    assert (first.worker_info.incarnation, second.worker_info.incarnation) == (0, 1)
    with first.as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2


def test_a_worker_that_comes_back_when_all_is_over(elastic, workers, monkeypatch):
    monkeypatch.setattr("zrpc.elastic._COME_BACK_WITHIN", 0.2)
    workers[1].layers[-1]._say_farewell = lambda: None  # as where it is killed
    workers[1].close()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda agent: agent.shutdown(), (workers[0], workers[2])))
    with pytest.raises(rpc.RendezvousError, match=r"has ended while it was started again: .*w0"):
        elastic.join("w1", 1, restarts=1)


def test_ranks_that_are_missing_are_named(elastic):
    elastic.world_size = 3
    with pytest.raises(rpc.RendezvousError, match=r"within 0.5 s, but ranks \[1, 2\] are missing"):
        elastic.join("w0", 0, restarts=0, options={"init_timeout": 0.5})
