import os
import signal
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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_handler_of_the_programs_own_cannot_be_held_back(name):
    number = getattr(signal, name)
    before = signal.signal(number, lambda *_: None)
    try:
        assert not hold_interrupts()
    finally:
        signal.signal(number, before)


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
