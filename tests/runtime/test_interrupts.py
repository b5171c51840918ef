"""Ctrl-C is held back for a moment, and not lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from zrpc.runtime.interrupts import hold_interrupts, release_interrupts

pytestmark = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
    reason="the program that runs the tests handles Ctrl-C itself",
)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_held_interrupt_is_raised_on_release() -> None:
    assert hold_interrupts()
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        release_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_release_without_an_interrupt_raises_nothing() -> None:
    assert hold_interrupts()
    release_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_holds_can_be_nested() -> None:
    assert hold_interrupts()
    assert hold_interrupts()
    interrupt()
    release_interrupts()  # not the outermost
    with pytest.raises(KeyboardInterrupt):
        release_interrupts()
    assert hold_interrupts()
    release_interrupts()  # it is not raised twice


class Interruption(BaseException):
    """The exception of the program's own handler."""


def raise_interruption(*_: Any) -> None:
    raise Interruption


@pytest.fixture
def own_handler() -> Iterator[list[Any]]:
    """Installs a handler of the program's own for Ctrl-C."""
    before = signal.signal(signal.SIGINT, raise_interruption)
    yield raise_interruption
    signal.signal(signal.SIGINT, before)


def test_the_programs_own_handler_is_called_on_release(own_handler: list[Any]) -> None:
    for _ in range(2):
        assert hold_interrupts()
        interrupt()
        with pytest.raises(Interruption):
            release_interrupts()
        assert signal.getsignal(signal.SIGINT) is own_handler


def test_the_programs_own_handler_is_not_called_without_an_interrupt(
    own_handler: list[Any],
) -> None:
    assert hold_interrupts()
    release_interrupts()
    assert signal.getsignal(signal.SIGINT) is own_handler


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.run leaves Ctrl-C alone there")
def test_the_first_interrupt_of_asyncio_run_cancels_its_task() -> None:
    async def main() -> str | None:
        assert hold_interrupts()
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
        assert hold_interrupts()
        interrupt()
        release_interrupts()
        interrupt()
        while len(seen) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # a third one would have arrived by now

    asyncio.run(main())
    assert seen == ["interrupt"] * 2


def test_a_handler_for_another_signal_cannot_be_held_back() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert not hold_interrupts()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_cannot_be_hashed_cannot_be_held_back() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, *_: Any) -> None:
            raise Interruption

    before = signal.signal(signal.SIGTERM, Unhashable())
    try:
        assert not hold_interrupts()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.system
def test_a_thread_that_forks_is_the_main_thread_of_the_child() -> None:
    statuses = []

    def fork() -> None:
        child = os.fork()
        if not child:
            status = 1
            try:
                assert hold_interrupts()
                interrupt()
                release_interrupts()
            except KeyboardInterrupt:
                status = 0
            finally:
                os._exit(status)
        statuses.append(os.waitpid(child, 0)[1])

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert statuses == [0]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert hold_interrupts()
        release_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_holding_in_other_threads_changes_nothing() -> None:
    held = []
    thread = threading.Thread(target=lambda: held.append(hold_interrupts()))
    thread.start()
    thread.join()
    assert held == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
