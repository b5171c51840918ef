"""Workers that leave a mesh that goes on: what they wait for, and what the others see."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from slow_handler import PATIENCE, entered, finish, slow

import zrpc as rpc
import zrpc.autograd as dist_autograd
from zrpc import leaving
from zrpc.shared_memory import SharedMemoryLayer
from zrpc.transport.segments import supports_segments

# What a busy machine may take longer.
SLACK = 4.0
# Elements of a tensor that goes by shared memory.
LARGE = 1 << 17


def answer(elements):
    entered.set()
    return torch.ones(elements)


def error_of(function):
    try:
        function()
    except Exception as error:
        return type(error)
    return None


def gone(agent, name):
    with agent.as_current():
        return error_of(lambda: rpc.rpc_sync(name, max, (1, 2))) is rpc.WorkerDied


@pytest.mark.skipif(not supports_segments(), reason="needs memfds")
def test_who_leaves_waits_until_what_it_has_lent_is_opened(elastic, until, monkeypatch):
    """Its answer lies in shared memory, and goes with it where the caller has yet to look."""
    monkeypatch.setattr(leaving, "_PATIENCE", PATIENCE)
    first, second = elastic.join_all(2)
    with second.as_current():
        rpc.rpc_sync("w0", answer, (LARGE,))
        until(lambda: 1 in first.layer(SharedMemoryLayer)._accepted, "second accepts")
        arrived, look = threading.Event(), threading.Event()
        dispatch = second._dispatch

        def late(*message):
            arrived.set()
            assert look.wait(PATIENCE)
            dispatch(*message)

        pool = first.layer(SharedMemoryLayer).pool
        until(lambda: not pool.lent, "all is returned")
        second._dispatch = late
        future = rpc.rpc_async("w0", answer, (8 * LARGE,))
        until(lambda: pool.lent and not first.callee.requests, "it has answered")
        assert arrived.wait(PATIENCE)
        leaves = threading.Thread(target=first.shutdown)
        leaves.start()
        leaves.join(0.3)
        look.set()
        assert future.wait().sum() == 8 * LARGE
    leaves.join(PATIENCE)
    assert not leaves.is_alive()


@pytest.mark.parametrize("graceful", [True, False])
def test_all_see_that_a_worker_has_left(elastic, until, graceful):
    first, second, third = elastic.join_all(3)
    told = []
    with third.as_current():
        rpc.on_worker_lost(lambda worker: told.append(worker.name))
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    first.shutdown(graceful=graceful)  # with which the others have exchanged nothing
    began = time.monotonic()
    until(lambda: gone(second, "w0") and gone(third, "w0"), "both see it")
    assert time.monotonic() - began < 1.0 + SLACK
    until(lambda: told == ["w0"], "the hook is told")
    with third.as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    assert elastic.join("w0", 0).worker_info.incarnation == 1


def test_rank_0_leaves_with_references_and_gradients_in_use_by_the_others(elastic):
    first, second, _ = elastic.join_all(3)
    with second.as_current():
        of_third = rpc.remote("w2", torch.ones, (2,))
        of_first = rpc.remote("w0", torch.ones, (2,))
        assert of_first.to_here().sum() == 2
        weight = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("w2", torch.mul, (weight, of_third.to_here())).sum()
            first.shutdown()
            dist_autograd.backward(context_id, [loss])
            assert dist_autograd.get_gradients(context_id)[weight].tolist() == [1, 1]
        assert rpc.rpc_sync("w2", lambda ref: ref.to_here().tolist(), (of_third,)) == [1, 1]
        with pytest.raises(rpc.OwnerDied, match="w0"):
            of_first.to_here()


def test_who_leaves_waits_for_its_own_calls_and_handlers(elastic):
    first, second = elastic.join_all(2)
    answers = []

    with second.as_current():
        future = rpc.rpc_async("w0", slow)
    assert entered.wait(PATIENCE)
    future.add_done_callback(lambda f: answers.append(f.value()))
    leaves = threading.Thread(target=first.shutdown)
    leaves.start()
    leaves.join(0.2)
    assert leaves.is_alive()
    finish.set()
    leaves.join(PATIENCE)
    assert not leaves.is_alive()
    assert future.wait() == "done"


def test_who_leaves_may_limit_the_wait(elastic):
    first, second = elastic.join_all(2)

    with second.as_current():
        future = rpc.rpc_async("w0", slow)
    assert entered.wait(PATIENCE)
    threading.Timer(0.5, finish.set).start()
    with pytest.raises(rpc.RpcTimeoutError, match="calls of others are still running here: 1"):
        first.shutdown(timeout=0.1)
    assert error_of(future.wait) is rpc.WorkerDied


@pytest.mark.parametrize("elements", [10, 4_000_000])
def test_the_last_answer_is_not_overtaken_by_the_farewell(elastic, elements):
    elastic.options["shared_memory"] = 0  # large tensors go by a connection of their own
    first, second = elastic.join_all(2)

    with second.as_current():
        future = rpc.rpc_async("w0", answer, (elements,))
        assert entered.wait(PATIENCE)
        first.shutdown()
        assert future.wait().sum() == elements


def test_a_flood_of_calls_does_not_keep_a_worker(elastic):
    first, second = elastic.join_all(2)
    stop = threading.Event()

    def flood():
        with second.as_current():
            while not stop.is_set():
                if error_of(lambda: rpc.rpc_sync("w0", max, (1, 2))) is rpc.WorkerDied:
                    return

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    try:
        first.shutdown()
        assert time.monotonic() - began < 2.0 + SLACK
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_fixed_mesh_in_which_workers_are_started_again_ends_together(elastic):
    elastic.world_size = 2
    agents = elastic.join_all(2, restarts=0)
    ended = threading.Thread(target=agents[0].shutdown)
    ended.start()
    ended.join(0.2)
    assert ended.is_alive()  # it waits for the other
    with agents[1].as_current():
        assert rpc.rpc_sync("w0", max, (1, 2)) == 2
    agents[1].shutdown()
    ended.join(PATIENCE)
    assert not ended.is_alive()
    # Who comes back at once finds those of the next mesh only.
    again = elastic.join_all(2, restarts=0)
    assert {agent.worker_info.incarnation for agent in again} == {1}
    with again[0].as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
