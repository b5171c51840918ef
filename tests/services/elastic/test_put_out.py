"""A worker that others have put out, in a mesh that workers join and leave."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

import zrpc
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.membership.agreement import How, LossNote
from zrpc.membership.failure_detector import Reason

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system


def call(agent: Agent, name: str) -> int:
    with agent.as_current():
        return zrpc.rpc_sync(name, max, (1, 2))


def gone(agent: Agent, name: str) -> str:
    try:
        call(agent, name)
    except zrpc.WorkerDied as error:
        return str(error)
    return ""


def test_those_that_join_later_do_not_count_it_and_it_may_come_back(elastic: Elastic) -> None:
    judge, other, out = elastic.join_all(3)
    for agent in (judge, other, out):
        assert [call(agent, name) for name in ("w0", "w1", "w2")] == [2, 2, 2]
    note = LossNote(How.PUT_OUT, *(agent.worker_info.member_id for agent in (out, judge, other)))
    judge.receiver.in_io_thread(partial(judge.peers.put_out, note))
    until(lambda: "it was put out" in gone(other, "w2"))
    until(lambda: "this worker was put out" in gone(out, "w1"))
    late = elastic.join("late", 3)
    assert [info.name for info in late.get_worker_infos()] == ["w0", "w1", "late"]
    again = elastic.join("w2", 2)
    until(lambda: not gone(late, "w2"))
    assert [call(agent, "w2") for agent in (judge, other, late)] == [2, 2, 2]
    assert call(again, "w0") == 2


def test_one_that_was_put_out_learns_it_from_the_log_and_counts_nobody_who_joins(
    elastic: Elastic,
) -> None:
    judge, other, out = elastic.join_all(3)
    note = LossNote(How.PUT_OUT, *(agent.worker_info.member_id for agent in (out, judge, other)))
    # It has no connection to the judge, which could tell it.
    judge.receiver.in_io_thread(partial(judge.peers.put_out, note))
    until(lambda: [info.name for info in out.get_worker_infos()] == ["w2"])
    assert "this worker was put out" in gone(out, "w1")
    elastic.join("late", 3)
    until(lambda: "zrpc-w2-log" not in [thread.name for thread in threading.enumerate()])
    assert [info.name for info in out.get_worker_infos()] == ["w2"]


def test_one_that_was_cut_off_does_not_count_those_that_join_the_others(elastic: Elastic) -> None:
    """It reads of them in the log, and they don't reach it: neither ever calls the other."""
    one, other, cut_off = elastic.join_all(3)

    def lose(agent: Agent, lost: Agent) -> None:
        remove = partial(agent.peers.remove, lost.worker_info.member_id, Reason.SILENT)
        agent.receiver.in_io_thread(remove)

    for each in (one, other):
        lose(each, cut_off)
        lose(cut_off, each)
    until(lambda: [info.name for info in cut_off.get_worker_infos()] == ["w2"])
    late = elastic.join("late", 3)
    lose(late, cut_off)
    until(lambda: gone(late, "w2"))
    until(lambda: [info.name for info in cut_off.get_worker_infos()] == ["w2"])
    assert [info.name for info in late.get_worker_infos()] == ["w0", "w1", "late"]
