"""Calls whose thread is interrupted, as by Ctrl-C, at any point."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.agents import join_all
from tests.support.gates import Gate
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from tests.support.watched import Watched
from zrpc import rpc_async, rpc_sync, stats
from zrpc.services.shm.service import SharedMemoryService

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def agents() -> Iterator[Any]:
    found = join_all(("worker0", 0, 2), ("worker1", 1, 2))
    yield found
    for agent in found:
        agent.close()


def shut_down(agents: Any) -> None:
    """A graceful shutdown counts all messages sent and received: none may be missing."""
    finish = start_all([lambda agent=agent: agent.shutdown(timeout=20) for agent in agents], SOON)
    assert finish() == [None, None]


def until_interrupted(call: Any, after: Any) -> Any:
    """Calls until Ctrl-C interrupts it, after some seconds or a wait; returns how often."""
    arrived, started, calls = threading.Event(), threading.Semaphore(0), 0

    def send() -> None:
        started.acquire()
        wait = after() and 0.0 if callable(after) else after
        while not arrived.wait(wait):
            os.kill(os.getpid(), signal.SIGINT)
            wait = 3.0  # once more: pyzmq swallows what is raised while it frees a frame

    sender = threading.Thread(target=send)
    sender.start()
    try:
        started.release()
        while True:
            call(calls)
            calls += 1
    except KeyboardInterrupt:
        pass
    finally:  # whatever the call raised: no signal may hit what comes after it
        arrived.set()
        sender.join()
    return calls


def sync_call(i: Any) -> None:
    assert rpc_sync("worker1", divmod, args=(i, 7)) == divmod(i, 7)


def tensor_call(i: Any, size: int = 10_000) -> None:
    # Too large for the table: a message of several frames.
    assert rpc_sync("worker1", torch.neg, args=(torch.full((size,), i),))[-1] == -i


def shared_call(i: Any) -> None:
    """By shared memory."""
    tensor_call(i, 100_000)


def mixed_call(i: Any) -> None:
    future = rpc_async("worker1", divmod, args=(i, 7))
    sync_call(i)
    assert future.wait() == divmod(i, 7)


def until_all_is_returned(agents: Any) -> None:
    """Waits until no segment of shared memory is lent, which has no event.

    What an error's frames refer to may be in a cycle.
    """
    pools = [agent.service(SharedMemoryService).pool for agent in agents]
    until(lambda: not any(pool.lent for pool in pools), "all is returned", collect=True)


# pyzmq looks after signals also where it frees a frame, and can't raise there.
@pytest.mark.system
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_at_any_moment_loses_no_message(agents: Any) -> None:
    """Also in torch or pyzmq; `signal_steps_cases` interrupts each step of zrpc."""
    with agents[0].as_current():
        for call in (sync_call, tensor_call, shared_call, mixed_call):
            call(1)
            done = tries = 0
            while tries < 20 or not done:  # a busy machine may begin no call in such a time
                done += until_interrupted(call, 0.002 + tries * 37e-6)
                tries += 1
            call(1)  # the next call is as good as the first
        until_all_is_returned(agents)
    shut_down(agents)


def test_an_interrupted_wait_goes_on_and_a_call_is_cancelled(agents: Any) -> None:
    """Nobody will ask for the outcome of the call."""
    with agents[0].as_current(), Watched() as watched:
        for _ in range(20):
            sync_call(1)
        future = rpc_async("worker1", watched.wait_inside, args=("done",))
        watched.await_entry()
        assert until_interrupted(lambda _: future.wait(), 0.02) == 0
        watched.open()
        assert future.wait() == "done"
        entered = watched.entered.acquire
        assert until_interrupted(lambda _: rpc_sync("worker1", watched.watch), entered) == 0
        assert watched.await_end() == [True]
        assert not stats().calls_in_flight
        sync_call(2)
    shut_down(agents)


def test_a_call_whose_future_is_lost_to_ctrl_c_is_cancelled(agents: Any, gate: Gate) -> None:
    """Also if Ctrl-C comes while handlers are held back, and so is raised at the end."""

    def run(number: int) -> None:
        futures, before = [], stats().calls_in_flight
        with at_step(number, interrupt) as steps, contextlib.suppress(KeyboardInterrupt):
            futures.append(rpc_async("worker1", gate.wait_inside, timeout=0))
        for future in futures:
            future.cancel()
        if not steps.place.endswith("in rpc_async"):  # which has the future, and is about to return
            assert stats().calls_in_flight == before, steps.place

    with agents[0].as_current():
        sync_call(1)
        for number in some_steps(lambda: run(0)):
            run(number)
    gate.open()
    shut_down(agents)


def test_a_graceful_shutdown_is_interrupted(agents: Any) -> None:
    assert until_interrupted(lambda _: agents[0].shutdown(), 0.1) == 0
    agents[0].shutdown(graceful=False)
    agents[1].shutdown(timeout=20)


def test_others_are_heard_while_a_thread_makes_one_call_after_the_other(agents: Any) -> None:
    """Though that thread receives its answers itself."""
    end = threading.Event()

    def call_on_and_on() -> None:
        with agents[0].as_current():
            while not end.is_set():
                sync_call(1)

    caller = threading.Thread(target=call_on_and_on)
    caller.start()
    with agents[1].as_current():
        for i in range(50):
            assert rpc_sync("worker0", divmod, args=(i, 7), timeout=10) == divmod(i, 7)
    end.set()
    caller.join()
