"""Workers that leave a running mesh: what they wait for, and what the others see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.services.elastic.slow_handler import PATIENCE, entered, finish, slow
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.agent.shutdown import ShutdownTiming
from zrpc.services.shm.service import SharedMemoryService

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system

# For a busy machine.
SLACK_SECONDS = 4.0
# Elements of a tensor that is sent by shared memory.
LARGE = 1 << 17


def answer(elements: int) -> torch.Tensor:
    entered.set()
    return torch.ones(elements)


def error_of(function: Callable[[], object]) -> type[Exception] | None:
    try:
        function()
    except Exception as error:
        return type(error)
    return None


def gone(agent: Agent, name: str) -> bool:
    with agent.as_current():
        return error_of(lambda: rpc.rpc_sync(name, max, (1, 2))) is rpc.WorkerDied


@pytest.mark.system
def test_an_answer_in_shared_memory_is_read_after_its_sender_has_left(elastic: Elastic) -> None:
    first, second = elastic.join_all(2)
    second.graceful_shutdown.timing = first.graceful_shutdown.timing = ShutdownTiming(
        new_work=PATIENCE
    )
    with second.as_current():
        rpc.rpc_sync("w0", answer, (LARGE,))
        arrived, look = threading.Event(), threading.Event()
        dispatch = second.receiver._dispatch

        def late(*message: Any) -> None:
            arrived.set()
            assert look.wait(PATIENCE)
            dispatch(*message)

        pool = first.service(SharedMemoryService).pool
        until(lambda: not pool.lent, "all is returned")
        second.receiver._dispatch = late
        future = rpc.rpc_async("w0", answer, (8 * LARGE,))
        until(lambda: pool.lent and not first.callee.requests, "it has answered")
        assert arrived.wait(PATIENCE)
        leaves = threading.Thread(target=first.shutdown)
        leaves.start()
        leaves.join(PATIENCE)
        assert not leaves.is_alive()
        look.set()
        assert future.wait().sum() == 8 * LARGE


@pytest.mark.parametrize("graceful", [True, False])
def test_all_see_that_a_worker_has_left(elastic: Elastic, graceful: bool) -> None:
    first, second, third = elastic.join_all(3)
    lost = []
    with third.as_current():
        rpc.on_worker_lost(lambda worker: lost.append(worker.name))
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    first.shutdown(graceful=graceful)  # with which the others have exchanged nothing
    began = time.monotonic()
    until(lambda: gone(second, "w0") and gone(third, "w0"), "both see it")
    assert time.monotonic() - began < 1.0 + SLACK_SECONDS
    until(lambda: lost == ["w0"], "the hook is called")
    with third.as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
    assert elastic.join("w0", 0).worker_info.incarnation == 1


def test_rank_0_leaves_with_references_and_gradients_in_use_by_the_others(elastic: Elastic) -> None:
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


def test_a_leaving_worker_waits_for_its_own_calls_and_handlers(elastic: Elastic) -> None:
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


def test_a_leaving_worker_may_limit_the_wait(elastic: Elastic) -> None:
    first, second = elastic.join_all(2)

    with second.as_current():
        future = rpc.rpc_async("w0", slow)
    assert entered.wait(PATIENCE)
    threading.Timer(0.5, finish.set).start()
    with pytest.raises(rpc.RpcTimeoutError, match="calls of others are still running here: 1"):
        first.shutdown(timeout=0.1)
    assert error_of(future.wait) is rpc.WorkerDied


@pytest.mark.parametrize("elements", [10, 4_000_000])
def test_the_last_answer_is_not_overtaken_by_the_leave_message(
    elastic: Elastic, elements: int
) -> None:
    elastic.options["shared_memory"] = 0  # large tensors are sent on a connection of their own
    first, second = elastic.join_all(2)

    with second.as_current():
        future = rpc.rpc_async("w0", answer, (elements,))
        assert entered.wait(PATIENCE)
        first.shutdown()
        assert future.wait().sum() == elements


def test_the_last_answer_is_not_overtaken_by_the_log(elastic: Elastic) -> None:
    elastic.limits = replace(elastic.limits, poll_seconds=0.001)
    first, second = elastic.join_all(2)
    held = threading.Event()
    second.receiver.in_io_thread(lambda: held.wait(PATIENCE))

    with second.as_current():
        future = rpc.rpc_async("w0", answer, (10,))  # no other message has come from there
        assert entered.wait(PATIENCE)
        first.shutdown()
        held.set()  # the log, and the answer
        assert future.wait().sum() == 10


def test_a_flood_of_calls_does_not_keep_a_worker(elastic: Elastic) -> None:
    first, second = elastic.join_all(2)
    stop = threading.Event()

    def flood() -> None:
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
        assert time.monotonic() - began < 2.0 + SLACK_SECONDS
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_fixed_mesh_with_restarts_shuts_down_together(elastic: Elastic) -> None:
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
    # A worker that comes back at once finds only members of the next mesh.
    again = elastic.join_all(2, restarts=0)
    assert {agent.worker_info.incarnation for agent in again} == {1}
    with again[0].as_current():
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2
