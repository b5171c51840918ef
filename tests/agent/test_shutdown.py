"""When a worker may leave a mesh that goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.records import peer_record
from zrpc.agent import shutdown
from zrpc.agent.shutdown import Phase, SoloShutdown
from zrpc.membership.view import Membership


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still but for what a test adds."""

    class Clock:
        now = 100.0

        def monotonic(self) -> Any:
            return self.now

    monkeypatch.setattr(shutdown, "time", Clock)
    Clock.monotonic = staticmethod(lambda: Clock.now)
    return Clock


def solo(work: Any) -> SoloShutdown:
    posted: Any = None  # nothing is
    return SoloShutdown(Membership([peer_record(0)], 0), posted, work)


def test_it_waits_for_silence(clock: Any) -> None:
    leaving = solo(set)
    assert leaving.phase is Phase.RUNNING
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
    assert (leaving.asked, leaving.phase, leaving.wait(1)) == (False, Phase.SETTLED, True)
    assert not leaving.done


def test_work_in_progress_at_first_is_waited_for_and_nothing_else(clock: Any) -> None:
    in_progress = {"first", "other"}
    leaving = solo(lambda: set(in_progress))
    leaving.begin()
    in_progress.add("later")
    in_progress.discard("other")
    clock.now += 0.9
    leaving.look()
    clock.now += 100
    leaving.look()
    assert leaving.phase is Phase.BEGUN
    in_progress.discard("first")
    leaving.look()
    assert leaving.phase is Phase.SETTLED


def test_it_leaves_when_it_is_told_to(clock: Any) -> None:
    leaving = solo(lambda: {"endless"})
    leaving.begin()
    leaving.leave_anyway()
    assert leaving.wait(0)
    assert leaving.phase is Phase.BEGUN
