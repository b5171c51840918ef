"""When a worker may leave a mesh that goes on."""

from __future__ import annotations

import pytest

import zrpc.leaving
import zrpc.silence
from zrpc.leaving import LeavingAlone


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what a test adds."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    for module in (zrpc.leaving, zrpc.silence):
        monkeypatch.setattr(module, "time", Clock)
    Clock.monotonic = staticmethod(lambda: Clock.now)
    return Clock


def test_it_waits_for_silence(clock):
    leaving = LeavingAlone(set)
    assert not leaving.under_way
    leaving.begin()
    assert leaving.asked
    leaving.idle(3, 5)
    clock.now += 0.02
    leaving.idle(3, 6)  # something has come in
    assert leaving.asked
    leaving.idle(3, 6)
    assert leaving.asked
    clock.now += 0.02
    leaving.idle(3, 6)
    assert (leaving.asked, leaving.settled, leaving.wait(1)) == (False, True, True)
    assert not leaving.done


def test_what_was_under_way_at_first_is_waited_for_and_nothing_else(clock):
    under_way = {"first", "other"}
    leaving = LeavingAlone(lambda: set(under_way))
    leaving.begin()
    under_way.add("later")
    under_way.discard("other")
    clock.now += 0.9
    leaving.look()
    clock.now += 100
    leaving.look()
    assert not leaving.settled
    under_way.discard("first")
    leaving.look()
    assert leaving.settled


def test_it_leaves_all_the_same(clock):
    leaving = LeavingAlone(lambda: {"endless"})
    leaving.begin()
    leaving.leave_all_the_same()
    assert leaving.wait(0)
    assert not leaving.settled
