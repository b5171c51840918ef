"""Ctrl-C and other signals are held back for a moment, and not lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.support.forks import exit_code, fork
from tests.support.handled import Handle, signal_handlers
from tests.support.recursion import call_with_frames_left
from tests.support.steps import at_step, interrupt
from zrpc.runtime.interrupts import (
    UninterruptedLock,
    hold_interrupts,
    pass_interruptibly,
    raised_by_handler,
    release_interrupts,
    run_interruptibly,
    uninterrupted,
)

pytestmark = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
    reason="the program that runs the tests handles Ctrl-C itself",
)


@pytest.mark.parametrize("block", [uninterrupted, UninterruptedLock()])
def test_a_block_that_begins_near_the_recursion_limit_ends(block: Any) -> None:
    def pass_block() -> None:
        with block:
            pass

    with uninterrupted:  # a nested block needs less room to begin
        ended = [call_with_frames_left(left, pass_block) for left in range(60)]
    assert [ended[0], ended[-1]] == [False, True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Interruption(BaseException):
    """The exception of the program's own handler."""


def raise_interruption(*_: Any) -> None:
    raise Interruption


def test_the_first_interrupt_of_asyncio_run_cancels_its_task() -> None:
    async def main() -> str | None:
        hold_interrupts()
        interrupt()
        release_interrupts()  # does not raise
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "cancelled"

    assert asyncio.run(main()) == "cancelled"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_of_an_event_loop_is_called_once() -> None:
    seen = []

    async def main() -> str | None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, seen.append, "interrupt")
        hold_interrupts()
        interrupt()
        release_interrupts()
        interrupt()
        while len(seen) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # a third one would have arrived by now

    asyncio.run(main())
    assert seen == ["interrupt"] * 2


SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class Handlers:
    """Sets handlers: itself, which notes its signals and can't be hashed, or another one."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, handle: Handle) -> None:
        self.called: list[int] = []
        self._handle = handle

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.called.append(number)

    def set(self, number: int, handler: Any = None) -> Any:
        return self._handle(handler or self, number)


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    with signal_handlers() as handle:
        yield Handlers(handle)


def test_the_programs_handler_of_any_signal_is_called_on_release(handlers: Handlers) -> None:
    for number in SIGNALS:
        handler = handlers.set(number)
        for raised in (True, False):
            with uninterrupted:
                if raised:
                    signal.raise_signal(number)
                assert handlers.called == []
            assert handlers.called == [number] * raised
            assert signal.getsignal(number) is handler
            handlers.called.clear()


def test_an_error_of_one_handler_does_not_lose_the_other_signals(handlers: Handlers) -> None:
    handlers.set(signal.SIGHUP, raise_interruption)
    handlers.set(signal.SIGUSR1, raise_interruption)
    handlers.set(signal.SIGTERM)
    hold_interrupts()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.raise_signal(number)
    with pytest.raises(Interruption):
        release_interrupts()
    assert handlers.called == [signal.SIGTERM]
    with uninterrupted:
        pass  # nothing is called twice


def test_a_handler_that_a_held_handler_sets_stays(handlers: Handlers) -> None:
    def once(number: int, frame: FrameType | None) -> None:
        handlers(number, frame)
        signal.signal(number, signal.SIG_IGN)

    handlers.set(signal.SIGUSR1, once)
    for _ in range(2):
        with uninterrupted:
            signal.raise_signal(signal.SIGUSR1)
    assert handlers.called == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_a_handler_may_interrupt_the_holding_and_the_releasing(handlers: Handlers) -> None:
    """It holds back signals itself, as its calls do; and all handlers are what they were."""

    def hold(number: int, frame: FrameType | None) -> None:
        with uninterrupted:
            handlers(number, frame)

    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]
    for number in numbers:
        handlers.set(number, hold)
    for step in itertools.count(1):
        with at_step(step, lambda: [signal.raise_signal(number) for number in numbers]) as steps:
            hold_interrupts()
            release_interrupts()
        assert {signal.getsignal(number) for number in numbers} == {hold}
        if not steps.place:
            break
        assert sorted(handlers.called) == sorted(numbers), steps.place
        handlers.called.clear()


def test_what_a_handler_raises_while_signals_are_being_held_is_raised_in_the_end(
    handlers: Handlers,
) -> None:
    handlers.set(signal.SIGUSR1, raise_interruption)
    handlers.set(signal.SIGTERM)
    raised = 0
    for step in itertools.count(1):
        with at_step(step, lambda: signal.raise_signal(signal.SIGUSR1)) as steps:
            try:
                with uninterrupted:
                    pass
            except Interruption:
                raised += 1
        assert signal.getsignal(signal.SIGUSR1) is raise_interruption
        assert signal.getsignal(signal.SIGTERM) is handlers
        if not steps.place:
            break
        assert raised == step, steps.place


def test_handlers_run_during_a_long_wait_and_not_after_it(handlers: Handlers) -> None:
    handlers.set(signal.SIGUSR1)

    def wait() -> None:
        signal.raise_signal(signal.SIGUSR1)
        assert handlers.called == [signal.SIGUSR1]

    with uninterrupted, uninterrupted:
        run_interruptibly(wait)
        signal.raise_signal(signal.SIGUSR1)
        assert len(handlers.called) == 1
    assert len(handlers.called) == 2


def test_a_wait_at_a_gate_is_interrupted_and_leaves_it_open(handlers: Handlers) -> None:
    gate = threading.Lock()
    gate.acquire()
    handlers.set(signal.SIGUSR1, raise_interruption)
    sender = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1))
    with uninterrupted:
        sender.start()
        with pytest.raises(Interruption):
            pass_interruptibly(gate, -1)
    sender.join()
    gate.release()
    assert pass_interruptibly(gate, -1)
    assert not gate.locked()


def test_the_holder_of_a_lock_runs_no_handler(handlers: Handlers) -> None:
    lock = UninterruptedLock()

    def handler(number: int, frame: FrameType | None) -> None:
        with lock:
            handlers(number, frame)

    handlers.set(signal.SIGUSR1, handler)
    with lock:
        signal.raise_signal(signal.SIGUSR1)
        assert handlers.called == []
    assert handlers.called == [signal.SIGUSR1]


def test_an_error_that_a_handler_has_raised_is_known(handlers: Handlers) -> None:
    handlers.set(signal.SIGUSR1, raise_interruption)
    with pytest.raises(Interruption) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert raised_by_handler(caught.value)
    with uninterrupted:
        assert raised_by_handler(caught.value)
    with pytest.raises(Interruption) as caught:
        raise Interruption
    assert not raised_by_handler(caught.value)


def test_an_ignored_signal_stays_ignored(handlers: Handlers) -> None:
    handlers.set(signal.SIGINT, signal.SIG_IGN)
    hold_interrupts()
    release_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_holding_in_other_threads_changes_nothing() -> None:
    thread = threading.Thread(target=hold_interrupts)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fork_in_a_thread(code: Callable[[], int]) -> int:
    """Returns how a child exits that another thread forks: it is the main thread there."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(exit_code(fork(code))))
    thread.start()
    thread.join()
    return codes[0]


@pytest.mark.system
def test_a_child_that_another_thread_forks_holds_back_signals_and_has_the_handlers(
    handlers: Handlers,
) -> None:
    def hold_one() -> int:
        try:
            hold_interrupts()
            interrupt()
            release_interrupts()
        except KeyboardInterrupt:
            return 3
        return 4

    assert fork_in_a_thread(hold_one) == 3
    handlers.set(signal.SIGUSR1)
    with uninterrupted:
        own = signal.getsignal(signal.SIGUSR1) is handlers
        assert fork_in_a_thread(lambda: signal.getsignal(signal.SIGUSR1) is handlers) == 1
    assert not own
