"""The warning about slow calls."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
from tests.services.inspection import doors
from tests.services.inspection.doors import knock, knock_and_await, knock_at
from tests.support.gates import Gate
from tests.support.waiting import until
from zrpc.services.inspection.stacks import activities
from zrpc.services.inspection.stuck import StuckCalls
from zrpc.testing import Mesh

LOGGER = "zrpc.inspection.stuck"


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the warnings about calls since this was last called."""

    def take() -> list[str]:
        found = [each.getMessage() for each in caplog.records if each.name == LOGGER]
        caplog.clear()
        return found

    return take


def stuck(mesh: Mesh, limit: float = 30.0) -> StuckCalls:
    """The rules, asked by the test and with times of its own."""
    return StuckCalls(
        mesh.agent(0), limit, lambda member: f"; rank {member} is alive", lambda *_: "running"
    )


def await_waiting(mesh: Mesh, count: int) -> None:
    """Waits until something at worker0 waits for so many calls."""
    until(lambda: any(len(a.calls) == count for a in activities(mesh.agent(0))), "nothing waits")


def later(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.mark.system
@pytest.mark.zrpc(options={"warn_after": 0.2})
def test_a_waiting_call_is_named_with_its_line_and_its_callee(
    mesh: Mesh, door: Gate, warned: Any
) -> None:
    waits = mesh.submit(0, knock_at, "worker1")
    [text] = until(warned)
    line = inspect.getsourcelines(knock_at)[1] + 1
    assert text.startswith("worker0 (rank 0) waits for a call:\n- knock at worker1 (rank 1), ")
    assert f"for which zrpc-test-worker0-main waits at {doors.__file__}:{line} in knock_at" in (
        text
    )
    assert "(warn_after is 0.2 s)" in text
    door.opened.set()
    assert waits.result() == "in"


def waits_for_all(worker: str) -> Any:
    return zrpc.wait_all([zrpc.rpc_async(worker, knock) for _ in range(2)])


def waits_by_torch(worker: str) -> Any:
    return torch.futures.wait_all([zrpc.rpc_async(worker, knock) for _ in range(2)])


async def gathers(worker: str) -> Any:
    return await asyncio.gather(*[knock_and_await(worker) for _ in range(2)])


@pytest.mark.parametrize(
    "handler", [knock_at, knock_and_await, waits_for_all, waits_by_torch, gathers]
)
def test_a_waiting_handler_reports_which_calls_it_waits_for(
    mesh: Mesh, door: Gate, warned: Any, handler: Any
) -> None:
    several = handler not in (knock_at, knock_and_await)
    waits = mesh.submit(1, zrpc.rpc_sync, "worker0", handler, ("worker1",))
    await_waiting(mesh, 1 + several)
    stuck(mesh).check_calls(later(31))
    [text] = warned()
    assert "- knock at worker1 (rank 1), for which " in text
    assert ("the longest of 2 such calls" in text) == several
    assert (
        f" in {handler.__name__}, running {handler.__name__} for worker1 (rank 1), for 31." in text
    )
    door.opened.set()
    assert waits.result() == (["in", "in"] if several else "in")


def test_each_call_is_named_once_with_those_that_began_then(
    caller: Mesh, door: Gate, warned: Any
) -> None:
    rules = stuck(caller)
    futures = [zrpc.rpc_async("worker1", knock) for _ in range(3)]
    door.await_entry(3)
    rules.check_calls(later(20))
    stuck(caller, limit=0).check_calls(later(1e6))  # no limit
    assert warned() == []
    rules.check_calls(later(30))
    [text] = warned()
    assert "waits for 3 calls" in text
    assert "the longest of 3 such calls" in text
    assert "\nRank 1 is alive.\n" in text
    rules.check_calls(later(60))
    assert warned() == []
    first = caller.agent(0).caller.calls.in_flight()[0].begun
    time.sleep(time.monotonic() - first)  # now the others are older than half of its age
    futures.append(zrpc.rpc_async("worker1", knock))
    rules.check_calls(later(90))
    [text] = warned()
    assert "waits for a call:" in text
    last = caller.agent(0).caller.calls.in_flight()[-1].begun
    stuck(caller, limit=last - first).check_calls(last + 0.001)
    [text] = warned()
    assert "waits for 3 calls" in text  # the other is younger than half of the limit
    door.opened.set()
    assert [future.wait() for future in futures] == ["in"] * 4


def named(name: str) -> Any:
    """Returns a function of this name that does what `knock` does."""

    def function() -> str:
        return knock()

    function.__name__ = function.__qualname__ = name
    return function


def test_many_places_are_not_all_listed(caller: Mesh, door: Gate, warned: Any) -> None:
    futures = [zrpc.rpc_async("worker1", named(f"function{i}")) for i in range(12)]
    stuck(caller).check_calls(later(31))
    [text] = warned()
    assert "waits for 12 calls" in text
    assert text.count("\n- function") == 10
    assert "- and others, in 2 more places" in text
    door.opened.set()
    assert [future.wait() for future in futures] == ["in"] * 12


def test_what_remote_makes_may_take_its_time(caller: Mesh, door: Gate, warned: Any) -> None:
    rref = zrpc.remote("worker1", knock)
    door.await_entry()
    rules = stuck(caller)
    rules.check_calls(later(31))
    assert warned() == []
    waits = caller.submit(0, rref.to_here)
    until(lambda: len(caller.agent(0).caller.calls) == 2)
    rules.check_calls(later(60))
    [text] = warned()
    assert "- to_here at worker1 (rank 1), for which zrpc-test-worker0-main waits" in text
    door.opened.set()
    assert waits.result() == "in"


class Holder:
    def knock(self) -> str:
        return knock()


def test_a_call_does_not_keep_its_function(mesh: Mesh, door: Gate) -> None:
    holder = Holder()
    gone = weakref.ref(holder)
    with mesh.agent(0).as_current():
        future = zrpc.rpc_async("worker1", holder.knock)
        del holder
        door.await_entry()
        # The callee has a copy.
        gc.collect()
        assert gone() is None
    door.opened.set()
    assert future.wait() == "in"
