"""What begins or goes on while a worker closes, at whichever step of its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.steps import at_step
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.agent.agent import Agent
from zrpc.testing import Mesh

MakeMesh = Callable[..., Mesh]


def call(agent: Agent) -> None:
    with agent.as_current():
        assert rpc.rpc_sync(1, echo, (1,), timeout=0) == 1


@pytest.mark.system
@pytest.mark.parametrize("begin", [call, Agent.shutdown], ids=["a call", "a shutdown"])
def test_what_begins_as_the_agent_closes_ends(
    make_mesh: MakeMesh, begin: Callable[[Agent], None]
) -> None:
    """At whichever step of it the agent is closed."""

    def run(number: int) -> None:
        mesh = make_mesh(workers=2)
        agent, closing = mesh.agent(0), []

        def close() -> None:
            closing.append(threading.Thread(target=agent.close))
            closing[0].start()
            closing[0].join(0.05)  # it may wait for this thread

        with at_step(number, close), contextlib.suppress(rpc.NotInitializedError):
            begin(agent)
        agent.close()
        for thread in closing:
            thread.join(SOON)
        mesh.shutdown(graceful=False)

    for number in range(1, 60, 3):
        run(number)


def wait_then_call_back(gate: Gate) -> Any:
    gate.wait_inside()
    return rpc.rpc_sync(0, echo, (1,), timeout=SOON)


@pytest.mark.system
def test_a_handler_that_calls_as_its_worker_leaves_does_not_answer_that_it_is_closed(
    make_mesh: MakeMesh,
) -> None:
    """At whichever step of the end: its caller learns that the worker has left."""

    def run(number: int) -> None:
        mesh = make_mesh(workers=2)
        agent = mesh.agent(1)
        with Gate() as gate:
            with mesh.agent(0).as_current():
                future = rpc.rpc_async(1, wait_then_call_back, (gate,))
            gate.await_entry()

            def go_on() -> None:
                gate.open()
                until(lambda: not agent.callee.requests)

            with at_step(number, go_on):
                agent.close()
            with contextlib.suppress(rpc.WorkerDied):
                assert future.wait() == 1
        mesh.shutdown(graceful=False)

    for number in range(1, 120, 4):
        run(number)
