"""Workers that listen where another worker listened that has died."""

from __future__ import annotations

import itertools
import socket
import threading
from typing import TYPE_CHECKING

import pytest

import zrpc as rpc
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.membership.failure_detector import Reason
from zrpc.transport.address import host_key

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system


@pytest.fixture
def port(elastic: Elastic, monkeypatch: pytest.MonkeyPatch) -> str:
    """A port; all workers use tcp, and none sees another's directory: each is in a container."""
    numbers = itertools.count()
    monkeypatch.setattr("zrpc.bootstrap.host_key", lambda: f"{host_key()}/{next(numbers)}")
    elastic.options |= {"transport": "tcp", "heartbeat_timeout": 2.0}
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def call(agent: Agent, to: str) -> int:
    with agent.as_current():
        return rpc.rpc_sync(to, max, (1, 2))


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
    first.liveness.tick = lambda leading: [] if held_up.is_set() else tick(leading)
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
