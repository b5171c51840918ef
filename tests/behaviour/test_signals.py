"""Signal handlers of programs: they make calls, and what they raise passes through unchanged."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.handled import Handle, signal_handlers
from tests.support.targets import echo
from tests.support.waiting import until
from tests.support.ways import WAYS
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh


@pytest.fixture
def handle() -> Iterator[Handle]:
    with signal_handlers() as handle:
        yield handle


def call() -> None:
    assert rpc.rpc_sync(1, echo, (1,)) == 1


class TestCallsInHandlers:
    def test_of_signals_that_other_processes_send(self, shared: Mesh, handle: Handle) -> None:
        """They come at any time, and interrupt each other's handlers."""
        numbers = [signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM, signal.SIGWINCH]
        answered: list[int] = []
        stop = threading.Event()

        def handler(number: int, frame: Any) -> None:
            call()
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
                call()
        finally:
            stop.set()
            sender.join()
        call()
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

    arrivals = itertools.count()

    def __reduce__(self) -> Any:
        return arrive, (next(self.arrivals),)


arrived = set()


def arrive(number: int) -> str:
    if number not in arrived:
        arrived.add(number)
        send()
    return "sent"


def send() -> str:
    signal.raise_signal(signal.SIGUSR1)
    return "sent"


def raises(error: BaseException) -> Callable[..., None]:
    """Returns a handler that raises an error."""

    def handler(number: int, frame: Any) -> None:
        raise error

    return handler


ERRORS = [
    TimeIsOver("after a time"),
    SystemExit(3),
    AttributeError("no such attribute"),
    KeyboardInterrupt(),
]


class TestErrorsOfHandlers:
    def test_while_arguments_are_pickled(self, shared: Mesh, handle: Handle) -> None:
        for error, args in itertools.product(ERRORS, [(Sends(),), (Sends(), lambda: 1)]):
            handle(raises(error))
            with pytest.raises(type(error)) as caught:
                rpc.rpc_sync(1, echo, args)
            assert caught.value is error
            call()

    def test_while_a_result_is_unpickled(self, shared: Mesh, handle: Handle) -> None:
        for way, error in itertools.product(WAYS, ERRORS):
            handle(raises(error))
            with pytest.raises(type(error)) as caught:
                way(1, SendsOnArrival)
            assert caught.value is error
            assert way(1, echo, (1,)) == 1
        future = rpc.rpc_async(1, SendsOnArrival)
        with pytest.raises(KeyboardInterrupt):
            future.wait()
        assert future.wait() == "sent"  # it has its value later

    def test_in_a_callback(self, shared: Mesh, handle: Handle) -> None:
        """The thread that ran it gets the error, and so does who waits for the callback's value."""
        error = TimeIsOver()
        handle(raises(error))
        future: rpc.Future[int] = rpc.Future()
        last = future.then(lambda _: send())
        with pytest.raises(TimeIsOver) as caught:
            future.set_result(1)
        assert caught.value is error
        with pytest.raises(TimeIsOver):
            last.wait()

    def test_in_a_backward_pass(self, shared: Mesh, handle: Handle) -> None:
        error = TimeIsOver()
        handle(raises(error))
        with rpc.autograd.context() as context_id:
            leaf = torch.ones(2, requires_grad=True)
            middle = leaf * 2
            middle.register_hook(lambda _: send() and None)
            loss = rpc.rpc_sync(1, torch.mul, (middle, 3)).sum()
            with pytest.raises(TimeIsOver) as caught:
                rpc.autograd.backward(context_id, [loss])
        assert caught.value is error
        call()

    def test_references_in_arguments_are_taken_back(self, caller: Mesh, handle: Handle) -> None:
        handle(raises(TimeIsOver()))
        rref = rpc.RRef([1])
        with pytest.raises(TimeIsOver):
            rpc.rpc_sync(1, echo, (rref, Sends()))
        until(caller.agent(0).service(RRefService).idle, "nothing of the reference is in progress")
        del rref
        until(lambda: not rpc.stats().rrefs_owned, collect=True)
