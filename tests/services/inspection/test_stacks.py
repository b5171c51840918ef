"""What threads and coroutines are seen to do, and from what that is known."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path

import pytest

import zrpc
from tests.services.inspection.doors import knock, knock_and_await
from tests.support.gates import Gate
from tests.support.waiting import until
from zrpc.services.inspection import stacks
from zrpc.services.inspection.snapshot import Activity
from zrpc.services.inspection.stacks import activities
from zrpc.testing import Mesh

ROOM = sorted(Path(stacks.__file__).parent.glob("*.py"))
# By these, code sees the local variables of other functions and their names.
LOCALS = {"f_locals", "co_varnames", "co_names", "co_cellvars", "co_freevars", "cr_locals"}


def reads_locals(tree: ast.AST) -> list[str]:
    return [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if node.attr in LOCALS
    ]


def test_no_local_variable_is_found_by_its_name_but_the_parameter_of_wait_all() -> None:
    """So that one that is renamed in another room breaks nothing here."""
    found = [name for path in ROOM for name in reads_locals(ast.parse(path.read_text()))]
    allowed = reads_locals(ast.parse(inspect.getsource(stacks._futures_waited_for)))
    assert found == allowed == ["f_locals"]


def running(mesh: Mesh, rank: int) -> list[Activity]:
    return [each for each in activities(mesh.agent(rank)) if each.request is not None]


def awaits_later() -> object:
    """A coroutine, of a function that doesn't say that it makes one."""
    return knock_and_await("worker0")


@pytest.mark.parametrize("handler", [knock_and_await, awaits_later])
def test_a_coroutine_is_not_in_the_thread_that_began_it(
    mesh: Mesh, door: Gate, handler: object
) -> None:
    args = ("worker0",) if handler is knock_and_await else ()
    with mesh.agent(0).as_current():
        future = zrpc.rpc_async("worker1", handler, args=args)  # type: ignore[arg-type]
        door.await_entry()
        until(lambda: any(each.calls for each in running(mesh, 1)))
        assert [(each.task, each.what) for each in running(mesh, 1)] == [
            (True, getattr(handler, "__name__", ""))
        ]
        door.opened.set()
        assert future.wait() == "in"


async def calls_and_sleeps() -> str:
    future = zrpc.rpc_async("worker0", knock)
    await asyncio.sleep(0.5)
    return str(await future)


@pytest.mark.system
def test_a_call_that_a_coroutine_does_not_await_yet_is_none_that_it_waits_for(
    caller: Mesh, door: Gate
) -> None:
    future = zrpc.rpc_async("worker1", calls_and_sleeps)
    door.await_entry()
    until(lambda: all(each.task for each in running(caller, 1)))  # it sleeps
    assert [(each.task, each.calls) for each in running(caller, 1)] == [(True, [])]
    until(lambda: [len(each.calls) for each in running(caller, 1)] == [1])
    door.opened.set()
    assert future.wait() == "in"


def test_a_thread_that_has_answered_handles_nothing(mesh: Mesh) -> None:
    for _ in range(10):
        assert mesh.run(0, zrpc.rpc_sync, "worker1", max, (1, 2)) == 2
    until(lambda: running(mesh, 1) == [])


def calls_twice(size: int) -> list[str]:
    futures = [zrpc.rpc_async("worker0", knock_with, args=(bytes(size),)) for _ in range(2)]
    return [future.wait() for future in futures]


def knock_with(_: bytes) -> str:
    return knock()


@pytest.mark.zrpc(options={"max_bytes_in_flight": 10_000, "shared_memory": 0})
def test_a_handler_that_waits_for_room_waits_for_the_call_that_needs_it(
    caller: Mesh, door: Gate
) -> None:
    future = zrpc.rpc_async("worker1", calls_twice, args=(9_000,))
    door.await_entry()
    calls = caller.agent(1).caller.calls
    until(lambda: len(calls) == 2)
    latest = max(call.call_id for call in calls.in_flight())
    assert [each.calls for each in running(caller, 1)] == [[latest]]
    door.opened.set()
    assert future.wait() == ["in", "in"]
