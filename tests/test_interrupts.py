import asyncio
import os
import signal
import sys
import threading

import pytest

from zrpc.interrupts import hold_interrupts, release_interrupts

pytestmark = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler,
    reason="the program that runs the tests handles Ctrl-C itself",
)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_what_came_is_raised_at_the_end():
    assert hold_interrupts()
    interrupt()
    with pytest.raises(KeyboardInterrupt):
        release_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_came():
    assert hold_interrupts()
    release_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested():
    assert hold_interrupts()
    assert hold_interrupts()
    interrupt()
    release_interrupts()  # not the last
    with pytest.raises(KeyboardInterrupt):
        release_interrupts()
    assert hold_interrupts()
    release_interrupts()  # it is not raised twice


class Interruption(BaseException):
    """What a handler of the program's own raises."""


def raise_interruption(*_):
    raise Interruption


@pytest.fixture
def own_handler():
    """A handler of the program's own for Ctrl-C."""
    before = signal.signal(signal.SIGINT, raise_interruption)
    yield raise_interruption
    signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_programs_own_is_called_at_the_end(own_handler):
    for _ in range(2):
        assert hold_interrupts()
        interrupt()
        with pytest.raises(Interruption):
            release_interrupts()
        assert signal.getsignal(signal.SIGINT) is own_handler


def test_a_handler_of_the_programs_own_is_not_called_for_nothing(own_handler):
    assert hold_interrupts()
    release_interrupts()
    assert signal.getsignal(signal.SIGINT) is own_handler


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.run leaves Ctrl-C alone there")
def test_the_first_interrupt_of_asyncio_run_cancels_its_task():
    async def main():
        assert hold_interrupts()
        interrupt()
        release_interrupts()  # does not raise
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "cancelled"

    assert asyncio.run(main()) == "cancelled"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_an_event_loop_is_called_once():
    seen = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, seen.append, "interrupt")
        assert hold_interrupts()
        interrupt()
        release_interrupts()
        interrupt()
        while len(seen) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # a third would have come by now

    asyncio.run(main())
    assert seen == ["interrupt"] * 2


def test_a_handler_for_another_signal_cannot_be_held_back():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert not hold_interrupts()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_does_no_harm():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert hold_interrupts()
        release_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_not_interrupted_anyhow():
    held = []
    thread = threading.Thread(target=lambda: held.append(hold_interrupts()))
    thread.start()
    thread.join()
    assert held == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
