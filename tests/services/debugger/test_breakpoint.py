"""zrpc.breakpoint, with a test in the place of the terminal."""

from __future__ import annotations

import bdb
import time
from typing import Any

import pytest

import zrpc
from tests.services.debugger.attached import Attached
from tests.support.identity import event
from tests.support.waiting import SOON, until
from zrpc.services.debugger.service import DebuggerService
from zrpc.testing import Mesh

# Much longer than the deadlines of the calls that wait, and than two ticks.
STANDS_SECONDS = 1.5
TIMEOUT = 1.0


def stops(number: int) -> int:
    doubled = number * 2
    zrpc.breakpoint()
    doubled += 1
    return doubled


def stops_for(worker: str, number: int) -> int:
    return zrpc.rpc_sync(worker, stops, (number,))


def waits_until_told() -> None:
    event("told").wait(SOON)


def stops_twice() -> str:
    zrpc.breakpoint()
    zrpc.breakpoint()
    return "end"


def nobody_comes() -> str:
    zrpc.breakpoint(timeout=0.1)
    return "went on"


async def stops_in_a_coroutine() -> str:
    here = "a coroutine"
    zrpc.breakpoint()
    return here


def prompt(mesh: Mesh, worker: int = 1) -> Attached:
    """A terminal that is attached to a worker, which shows its prompt."""
    terminal = Attached(mesh, worker)
    terminal.read_until("(Pdb) ")
    return terminal


def stands(mesh: Mesh, worker: int) -> bool:
    return mesh.agent(worker).service(DebuggerService).stats()["breakpoints"] > 0


def test_handler_shows_its_variables_and_can_change_them(mesh: Mesh) -> None:
    called = mesh.submit(0, zrpc.rpc_sync, 1, stops, (4,))
    terminal = Attached(mesh, 1)
    seen = terminal.read_until("(Pdb) ")
    assert "-- worker1 (rank 1), pid" in seen
    assert "test_breakpoint.py" in seen
    assert "in stops" in seen
    assert "doubled += 1" in seen
    terminal.send("p doubled, number")
    assert terminal.read_until("(Pdb) ").startswith("(8, 4)")
    terminal.send("print(number)")
    assert terminal.read_until("(Pdb) ").startswith("4")
    terminal.send("doubled = 40")
    terminal.send("c")
    assert called.result(SOON) == 41
    assert "goes on" in terminal.read_to_end()


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_no_call_of_the_mesh_times_out_while_a_worker_stands(mesh: Mesh) -> None:
    nested = mesh.submit(0, zrpc.rpc_sync, 1, stops_for, ("worker2", 1), timeout=TIMEOUT)
    terminal = prompt(mesh, 2)
    # And what waits for something else in the mesh.
    barrier = mesh.submit(1, zrpc.barrier, ["worker0", "worker1"], timeout=TIMEOUT)
    time.sleep(STANDS_SECONDS)  # nothing may happen in this time
    assert not nested.done()
    assert not barrier.done()
    terminal.send("c")
    assert nested.result(SOON) == 3
    mesh.run(0, zrpc.barrier, ["worker0", "worker1"], timeout=SOON)
    barrier.result(SOON)


@pytest.mark.system
def test_deadlines_pass_again_afterwards(mesh: Mesh) -> None:
    called = mesh.run(0, zrpc.rpc_async, 1, stops, (1,))
    terminal = prompt(mesh)
    late = mesh.run(0, zrpc.rpc_async, 1, waits_until_told, (), None, 0.5)
    terminal.send("c")
    assert called.wait() == 3
    with pytest.raises(zrpc.RpcTimeoutError):
        late.wait()
    event("told").set()


def test_program_of_a_worker_stops_too(mesh: Mesh) -> None:
    result = mesh.submit(1, stops, 2)
    terminal = prompt(mesh)
    assert stands(mesh, 1)
    assert mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2)) == 2  # it answers meanwhile
    terminal.send("c")
    assert result.result(SOON) == 5


def test_stepping_ends_with_the_handler(mesh: Mesh) -> None:
    called = mesh.submit(0, zrpc.rpc_sync, 1, stops, (1,))
    terminal = Attached(mesh, 1)
    for step in ("return doubled", "--Return--"):
        terminal.read_until("(Pdb) ")
        terminal.send("n")
        terminal.read_until(step)
    terminal.read_until("(Pdb) ")
    terminal.send("n")
    assert called.result(SOON) == 3
    assert "goes on" in terminal.read_to_end()
    until(lambda: not stands(mesh, 1))


def test_breakpoint_reached_by_stepping_uses_the_same_prompt(mesh: Mesh) -> None:
    called = mesh.submit(0, zrpc.rpc_sync, 1, stops_twice)
    terminal = prompt(mesh)
    terminal.send("n")  # over the second one
    terminal.read_until('return "end"')
    terminal.send("c")
    assert called.result(SOON) == "end"


def test_quitting_raises_in_the_handler(mesh: Mesh) -> None:
    called = mesh.submit(0, zrpc.rpc_sync, 1, stops, (1,))
    terminal = prompt(mesh)
    terminal.send("q")
    with pytest.raises(bdb.BdbQuit):
        called.result(SOON)
    assert mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2)) == 2


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_one_prompt_at_a_time_and_other_handlers_run_meanwhile(mesh: Mesh) -> None:
    calls = [mesh.run(0, zrpc.rpc_async, 1, stops, (n,)) for n in range(2)]
    for _ in calls:
        terminal = prompt(mesh)
        assert mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2)) == 2
        terminal.send("c")
        terminal.read_to_end()
    assert sorted(call.wait() for call in calls) == [1, 3]


def test_coroutine_stops(mesh: Mesh) -> None:
    called = mesh.submit(0, zrpc.rpc_sync, 1, stops_in_a_coroutine)
    terminal = prompt(mesh)
    terminal.send("p here")
    terminal.read_until("'a coroutine'")
    terminal.send("c")
    assert called.result(SOON) == "a coroutine"


def test_program_goes_on_if_nobody_attaches_in_time(
    mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    assert mesh.run(0, zrpc.rpc_sync, 1, nobody_comes) == "went on"
    assert "nobody has attached within 0.1 s" in capfd.readouterr().err


def test_outside_of_a_mesh_the_program_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    zrpc.breakpoint()
    assert "but goes on: there is no terminal" in capfd.readouterr().err
    for timeout in (float("nan"), -1):
        with pytest.raises(ValueError, match="timeout"):
            zrpc.breakpoint(timeout)


@pytest.mark.system
@pytest.mark.parametrize("attached", [False, True])
def test_worker_that_leaves_lets_the_handler_go_on(mesh: Mesh, attached: bool) -> None:
    called = mesh.submit(0, zrpc.rpc_sync, 1, stops, (1,))
    if attached:
        prompt(mesh)
    until(lambda: stands(mesh, 1))
    mesh.agent(1).close()
    with pytest.raises(zrpc.WorkerDied):
        called.result(SOON)
    until(lambda: not stands(mesh, 1))
    with pytest.raises(zrpc.RpcTimeoutError):  # deadlines pass again
        mesh.run(0, zrpc.rpc_sync, 0, waits_until_told, (), None, 0.3)
    event("told").set()


def raises(value: Any) -> None:
    raise KeyError(value)


def passes_on(worker: str) -> None:
    zrpc.rpc_sync(worker, raises, ("inner",))


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_post_mortem_opens_only_on_the_worker_that_raised(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZRPC_PDB", "1")
    called = mesh.submit(0, zrpc.rpc_sync, 1, passes_on, ("worker2",), timeout=TIMEOUT)
    terminal = Attached(mesh, 2)
    seen = terminal.read_until("(Pdb) ")
    assert "has raised KeyError" in seen
    assert "KeyError: 'inner'" in seen
    terminal.send("p value")
    terminal.read_until("'inner'")
    time.sleep(STANDS_SECONDS)
    assert not called.done()
    terminal.send("q")
    with pytest.raises(KeyError):  # worker1 has no prompt, or this would never end
        called.result(SOON)
