"""Workers that leave a running mesh, or are put out of it: what they and the others see."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.services.elastic.calls import PATIENCE, call, entered, finish, slow
from tests.services.elastic.conftest import Elastic
from tests.support.waiting import pending, until
from zrpc.agent.agent import Agent
from zrpc.agent.shutdown import ShutdownTiming
from zrpc.membership.agreement import How, LossNote
from zrpc.membership.failure_detector import Reason
from zrpc.services.shm.service import SharedMemoryService

pytestmark = pytest.mark.system

# For a busy machine.
SLACK_SECONDS = 4.0
# Elements of a tensor that is sent by shared memory.
LARGE = 1 << 17


def answer(elements: int) -> torch.Tensor:
    entered.set()
    return torch.ones(elements)


def why_gone(agent: Agent, name: str) -> str:
    try:
        call(agent, name)
    except rpc.WorkerDied as error:
        return str(error)
    return ""


def test_an_answer_in_shared_memory_is_read_after_its_sender_has_left(elastic: Elastic) -> None:
    first, second = elastic.join_all(2)
    second.graceful_shutdown.timing = first.graceful_shutdown.timing = ShutdownTiming(
        new_work=PATIENCE
    )
    with second.as_current():
        rpc.rpc_sync("w0", answer, (LARGE,))
        pool, look = first.service(SharedMemoryService).pool, threading.Event()
        until(lambda: not pool.lent, "all is returned")
        second.receiver.in_io_thread(lambda: look.wait(PATIENCE))
        future = rpc.rpc_async("w0", answer, (8 * LARGE,))
        until(lambda: pool.lent and not first.callee.requests, "it has answered")
        elastic.leave(first).result(PATIENCE)
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
    until(lambda: why_gone(second, "w0") and why_gone(third, "w0"), "both see it")
    assert time.monotonic() - began < 1.0 + SLACK_SECONDS
    until(lambda: lost == ["w0"], "the hook is called")
    assert call(third, "w1") == 2
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

    with second.as_current():
        future = rpc.rpc_async("w0", slow)
    assert entered.wait(PATIENCE)
    leaves = elastic.leave(first)
    assert pending(leaves, 0.2)
    finish.set()
    leaves.result(PATIENCE)
    assert future.wait() == "done"


def test_a_leaving_worker_may_limit_the_wait(elastic: Elastic) -> None:
    first, second = elastic.join_all(2)

    with second.as_current():
        future = rpc.rpc_async("w0", slow)
    assert entered.wait(PATIENCE)
    threading.Timer(0.5, finish.set).start()
    with pytest.raises(rpc.RpcTimeoutError, match="calls of others are still running here: 1"):
        first.shutdown(timeout=0.1)
    with pytest.raises(rpc.WorkerDied):
        future.wait()


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

    def flood() -> None:
        while not why_gone(second, "w0"):
            pass

    with ThreadPoolExecutor(3) as threads:
        floods = [threads.submit(flood) for _ in range(3)]
        began = time.monotonic()
        first.shutdown()
        assert time.monotonic() - began < 2.0 + SLACK_SECONDS
        for each in floods:
            each.result(PATIENCE)


def test_a_fixed_mesh_with_restarts_shuts_down_together(elastic: Elastic) -> None:
    elastic.world_size = 2
    agents = elastic.join_all(2, restarts=0)
    leaves = elastic.leave(agents[0])
    assert pending(leaves, 0.2)  # it waits for the other
    assert call(agents[1], "w0") == 2
    agents[1].shutdown()
    leaves.result(PATIENCE)
    # A worker that comes back at once finds only members of the next mesh.
    again = elastic.join_all(2, restarts=0)
    assert {agent.worker_info.incarnation for agent in again} == {1}
    assert call(again[0], "w1") == 2


# -- put out by others -----------------------------------------------------------------------


def names_at(agent: Agent) -> list[str]:
    return [info.name for info in agent.get_worker_infos()]


def put_out(judge: Agent, other: Agent, out: Agent) -> None:
    note = LossNote(How.PUT_OUT, *(agent.worker_info.member_id for agent in (out, judge, other)))
    judge.receiver.in_io_thread(partial(judge.peers.put_out, note))


def test_those_that_join_later_do_not_count_one_that_is_out_and_it_may_come_back(
    elastic: Elastic,
) -> None:
    judge, other, out = elastic.join_all(3)
    for agent in (judge, other, out):
        assert [call(agent, name) for name in ("w0", "w1", "w2")] == [2, 2, 2]
    put_out(judge, other, out)
    until(lambda: "it was put out" in why_gone(other, "w2"))
    until(lambda: "this worker was put out" in why_gone(out, "w1"))
    late = elastic.join("late", 3)
    assert names_at(late) == ["w0", "w1", "late"]
    again = elastic.join("w2", 2)
    until(lambda: not why_gone(late, "w2"))
    assert [call(agent, "w2") for agent in (judge, other, late)] == [2, 2, 2]
    assert call(again, "w0") == 2


def test_one_that_was_put_out_learns_it_from_the_log_and_counts_nobody_who_joins(
    elastic: Elastic,
) -> None:
    judge, other, out = elastic.join_all(3)
    # It has no connection to the judge, which could tell it.
    put_out(judge, other, out)
    until(lambda: names_at(out) == ["w2"])
    assert "this worker was put out" in why_gone(out, "w1")
    elastic.join("late", 3)
    until(lambda: "zrpc-w2-log" not in [thread.name for thread in threading.enumerate()])
    assert names_at(out) == ["w2"]


def test_one_that_was_cut_off_does_not_count_those_that_join_the_others(elastic: Elastic) -> None:
    """It reads of them in the log, and they don't reach it: neither ever calls the other."""
    one, other, cut_off = elastic.join_all(3)

    def lose(agent: Agent, lost: Agent) -> None:
        remove = partial(agent.peers.remove, lost.worker_info.member_id, Reason.SILENT)
        agent.receiver.in_io_thread(remove)

    for each in (one, other):
        lose(each, cut_off)
        lose(cut_off, each)
    until(lambda: names_at(cut_off) == ["w2"])
    late = elastic.join("late", 3)
    lose(late, cut_off)
    until(lambda: why_gone(late, "w2"))
    until(lambda: names_at(cut_off) == ["w2"])
    assert names_at(late) == ["w0", "w1", "late"]
