"""Names of actors while workers join and leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import zrpc as rpc
from zrpc.agent.agent import Agent

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system


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


def test_makers_share_one_actor_while_workers_join_and_leave(elastic: Elastic) -> None:
    first, *others = elastic.join_all(3)

    def share(agent: Agent) -> Any:
        return make(agent, "shared", agent.worker_info.name, exist_ok=True)

    with ThreadPoolExecutor(8) as pool:
        joins = [pool.submit(elastic.join, f"late{i}", 10 + i) for i in range(2)]
        shares = [pool.submit(share, agent) for agent in others]
        elastic.agents.remove(first)
        leave = pool.submit(first.shutdown)
        late = [pool.submit(share, join.result(20)) for join in joins]
        leave.result(20)
        assert len({future.result(20) for future in (*shares, *late)}) == 1
