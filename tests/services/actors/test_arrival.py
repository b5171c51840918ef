"""Calls of an actor that arrive at odd moments: as the value becomes one, or without memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

import zrpc
from tests.support.waiting import SOON, until
from zrpc.services.rref.service import RRefService
from zrpc.testing import local_mesh

pytestmark = pytest.mark.system

_CALLS = 6
_begun, _made = threading.Event(), threading.Event()


@zrpc.actor
class Log:
    def __init__(self) -> None:
        _begun.set()
        assert _made.wait(SOON)
        self.calls: list[int] = []

    def note(self, call: int) -> list[int]:
        self.calls.append(call)
        return [*self.calls]


@pytest.fixture
def steps() -> Iterator[list[int]]:
    """Lets the constructor end before a line of what a call runs as it arrives.

    The list has the number of lines until then.
    """
    left: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not RRefService.run_method.__code__:
            return None
        if event == "line" and left:
            left[0] -= 1
            if left[0] == 0:
                _made.set()
                until(lambda: "value" not in frame.f_locals or frame.f_locals["value"].ready)
        return trace

    threading.settrace(trace)
    yield left
    threading.settrace(None)  # type: ignore[arg-type]


def test_calls_keep_their_order_whenever_it_does(steps: list[int]) -> None:
    def calls() -> list[Any]:
        log = zrpc.remote("worker1", Log)
        assert _begun.wait(SOON)  # else it would begin after the calls that have come with it
        return [future.wait() for future in [log.rpc_async().note(i) for i in range(_CALLS)]]

    with local_mesh(2, options={"rpc_timeout": 20}) as mesh:
        for number in range(1, 20):  # more lines than it has, and fewer than all calls run
            for event in (_begun, _made):
                event.clear()
            steps[:] = [number]
            assert mesh.run(0, calls) == [[*range(i + 1)] for i in range(_CALLS)], number
            assert steps[0] <= 0


def test_a_call_whose_message_is_not_handled_holds_up_no_later_ones() -> None:
    """There was no memory for its handler: its number in the order of the calls is passed over."""
    handler, armed = RRefService.run_method.__code__, threading.Event()

    def fail(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is handler and armed.is_set():
            armed.clear()
            raise MemoryError

    threading.setprofile(fail)  # in the threads that start from now on
    try:
        with local_mesh(2, options={"rpc_timeout": 20}) as mesh, mesh.agent(0).as_current():
            _made.set()
            log = zrpc.remote(1, Log)
            assert log.rpc_sync().note(1) == [1]
            armed.set()
            futures = [log.rpc_async().note(number) for number in (10, 100)]
            with pytest.raises(MemoryError):
                futures[0].wait()
            assert futures[1].wait() == [1, 100]
            del log, futures
    finally:
        threading.setprofile(None)
