"""Groups of workers that join, leave and are replaced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import zrpc
from tests.services.elastic.conftest import elastic, events  # noqa: F401
from tests.support.waiting import SOON, pending, until

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system


def name() -> str:
    return zrpc.get_worker_info().name


def test_a_group_waits_for_its_size(elastic: Elastic) -> None:  # noqa: F811
    first, _ = elastic.join_all(2)

    def wait() -> list[str]:
        with first.as_current():
            return [*zrpc.group("w*", size=3, timeout=SOON)]

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert pending(waiting, 0.1)
        elastic.join("w7")
        assert waiting.result(SOON) == ["w0", "w1", "w7"]


def test_a_wait_for_workers_ends_with_this_one(elastic: Elastic) -> None:  # noqa: F811
    first, _ = elastic.join_all(2)

    def wait() -> None:
        with first.as_current():
            zrpc.group("w*", size=3, timeout=0)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert pending(waiting, 0.1)
        elastic.agents.remove(first)
        first.close()
        with pytest.raises(zrpc.NotInitializedError):
            waiting.result(SOON)


def test_a_live_group_calls_who_is_there(elastic: Elastic) -> None:  # noqa: F811
    first, _ = elastic.join_all(2)
    with first.as_current():
        fixed, live = zrpc.group("w*"), zrpc.group("w*", live=True)
        late = elastic.join("w5")
        assert [*live] == ["w0", "w1", "w5"]
        assert repr(live) == "<group of workers: 'w*', live: w0, w1, w5>"
        assert zrpc.rpc_sync(live, name) == ["w0", "w1", "w5"]
        assert zrpc.rpc_sync(fixed, name) == ["w0", "w1"]
        assert [value.owner_name() for value in zrpc.remote(live, list)] == ["w0", "w1", "w5"]
        only = zrpc.group("w5", live=True)
        elastic.crash(late)
        until(lambda: len(live) == 2, "the loss is known")
        assert repr(live) == "<group of workers: 'w*', live: w0, w1>"
        assert zrpc.rpc_sync(live, name) == ["w0", "w1"]
        with pytest.raises(zrpc.RpcError, match="match 'w5', found none in the mesh now"):
            zrpc.rpc_sync(only, name)
