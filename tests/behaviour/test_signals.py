"""Signals: Ctrl-C in a call, and handlers of programs, which make calls or raise."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.agents import join_all
from tests.support.gates import Gate
from tests.support.handled import Handle, signal_handlers
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.targets import echo, fail, fail_with
from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from tests.support.watched import Watched
from tests.support.ways import WAYS
from zrpc.services.rref.service import RRefService
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh


@pytest.fixture
def agents(no_leaks: None) -> Iterator[Any]:
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
    assert rpc.rpc_sync("worker1", divmod, args=(i, 7)) == divmod(i, 7)


def tensor_call(i: Any, size: int = 10_000) -> None:
    # Too large for the table: a message of several frames.
    assert rpc.rpc_sync("worker1", torch.neg, args=(torch.full((size,), i),))[-1] == -i


def shared_call(i: Any) -> None:
    """By shared memory."""
    tensor_call(i, 100_000)


def mixed_call(i: Any) -> None:
    future = rpc.rpc_async("worker1", divmod, args=(i, 7))
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
        future = rpc.rpc_async("worker1", watched.wait_inside, args=("done",))
        watched.await_entry()
        assert until_interrupted(lambda _: future.wait(), 0.02) == 0
        watched.open()
        assert future.wait() == "done"
        entered = watched.entered.acquire
        assert until_interrupted(lambda _: rpc.rpc_sync("worker1", watched.watch), entered) == 0
        assert watched.await_end() == [True]
        assert not rpc.stats().calls_in_flight
        sync_call(2)
    shut_down(agents)


def test_a_call_whose_future_is_lost_to_ctrl_c_is_cancelled(agents: Any, gate: Gate) -> None:
    """Also if Ctrl-C comes while handlers are held back, and so is raised at the end."""

    def run(number: int) -> None:
        futures, before = [], rpc.stats().calls_in_flight
        with at_step(number, interrupt) as steps, contextlib.suppress(KeyboardInterrupt):
            futures.append(rpc.rpc_async("worker1", gate.wait_inside, timeout=0))
        for future in futures:
            future.cancel()
        if not steps.place.endswith("in rpc_async"):  # which has the future, and is about to return
            assert rpc.stats().calls_in_flight == before, steps.place

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


@pytest.fixture
def handle() -> Iterator[Handle]:
    with signal_handlers() as handle:
        yield handle


class TestCallsInHandlers:
    def test_of_signals_that_other_processes_send(self, shared: Mesh, handle: Handle) -> None:
        """They come at any time, and interrupt each other's handlers."""
        numbers = [signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM, signal.SIGWINCH]
        answered: list[int] = []
        stop = threading.Event()

        def handler(number: int, frame: Any) -> None:
            sync_call(1)
            answered.append(number)

        def send() -> None:
            for number in numbers * 25:
                if not stop.wait(0.001):
                    os.kill(os.getpid(), number)

        for number in numbers:
            handle(handler, number)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            while sender.is_alive():
                sync_call(1)
        finally:
            stop.set()
            sender.join()
        sync_call(1)
        assert set(answered) == set(numbers)

    def test_before_a_handler_exits(self, succeed: Callable[..., list[str]]) -> None:
        """As a job that is preempted saves its checkpoint."""
        outputs = succeed(
            """
import os, signal, sys
import zrpc as rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"w{rank}")

def save(number, frame):
    print("saved", rpc.rpc_sync("w1", pow, (2, 5)))
    rpc.shutdown()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
if rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    while True:
        rpc.rpc_sync("w1", divmod, (7, 2))
rpc.shutdown()
"""
        )
        assert "saved 32" in outputs[0]


class TimeIsOver(Exception):
    """What a handler raises after a time."""


class Sends:
    """A value that sends a signal when it is pickled."""

    def __reduce__(self) -> Any:
        return str, (send(),)


class SendsOnArrival:
    """A value that sends a signal when it is unpickled for the first time."""

    def __reduce__(self) -> Any:
        return send_once, (next(numbers),)


numbers = itertools.count()
sent: set[int] = set()


def send_once(number: int) -> str:
    if number not in sent:
        sent.add(number)
        send()
    return "sent"


def send() -> str:
    signal.raise_signal(signal.SIGUSR1)
    return "sent"


ERRORS = [
    TimeIsOver("after a time"),
    SystemExit(3),
    AttributeError("no such attribute"),
    KeyboardInterrupt(),
]


@contextlib.contextmanager
def raised(handle: Handle, error: BaseException) -> Iterator[None]:
    """Has the handler raise an error, which the block raises unchanged."""
    handle(lambda *_: fail(error))
    with pytest.raises(type(error)) as caught:
        yield
    assert caught.value is error


class TestErrorsOfHandlers:
    def test_while_arguments_are_pickled(self, shared: Mesh, handle: Handle) -> None:
        for error, args in itertools.product(ERRORS, [(Sends(),), (Sends(), lambda: 1)]):
            with raised(handle, error):
                rpc.rpc_sync(1, echo, args)
            sync_call(1)

    def test_while_a_result_is_unpickled(self, shared: Mesh, handle: Handle) -> None:
        for way, error in itertools.product(WAYS, ERRORS):
            with raised(handle, error):
                way(1, SendsOnArrival)
            assert way(1, echo, (1,)) == 1
        future = rpc.rpc_async(1, SendsOnArrival)
        with raised(handle, KeyboardInterrupt()):
            future.wait()
        assert future.wait() == "sent"  # it has its value later

    def test_in_a_callback(self, shared: Mesh, handle: Handle) -> None:
        """The thread that ran it gets the error, and so does who waits for the callback's value."""
        future: rpc.Future[int] = rpc.Future()
        last = future.then(lambda _: send())
        with raised(handle, TimeIsOver()):
            future.set_result(1)
        with pytest.raises(TimeIsOver):
            last.wait()

    def test_in_a_backward_pass(self, shared: Mesh, handle: Handle) -> None:
        with rpc.autograd.context() as context_id:
            leaf = torch.ones(2, requires_grad=True)
            middle = leaf * 2
            middle.register_hook(lambda _: send() and None)
            loss = rpc.rpc_sync(1, torch.mul, (middle, 3)).sum()
            with raised(handle, TimeIsOver()):
                rpc.autograd.backward(context_id, [loss])
        sync_call(1)

    def test_references_in_arguments_are_taken_back(self, caller: Mesh, handle: Handle) -> None:
        handle(lambda *_: fail_with(TimeIsOver))  # the error is not kept
        rref = rpc.RRef([1])
        with pytest.raises(TimeIsOver):
            rpc.rpc_sync(1, echo, (rref, Sends()))
        until(caller.agent(0).service(RRefService).idle, "nothing of the reference is in progress")
        del rref
        until(lambda: not rpc.stats().rrefs_owned, collect=True)
