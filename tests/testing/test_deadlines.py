"""Whom the deadline of a mesh interrupts: only the code that has entered it, while that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import zrpc
from tests.support.waiting import SOON, until
from tests.support.waiting_circle import holds_up_its_loop
from zrpc.testing import Mesh, MeshTimeout, local_mesh

pytestmark = pytest.mark.system

# Longer than a mesh of threads takes to start on a busy machine, and that much is waited for.
TIMEOUT = 0.4
OF_PROCESSES = 2.0
FAILED = r"not finished within [\d.]+ s"


class Cells:
    """The cells of a notebook, run one after another, and what runs between them."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {"local_mesh": local_mesh, "zrpc": zrpc}

    def run(self, cell: str) -> None:
        exec(compile(cell, "<cell>", "exec"), self.variables)


def wait_between_cells() -> None:
    """Waits, as the kernel does, until the deadline of all meshes has passed."""
    until(lambda: all(each.name != "zrpc-watchdog" for each in threading.enumerate()))


@pytest.fixture
def cells() -> Cells:
    return Cells()


@pytest.mark.parametrize(
    "options",
    [f"timeout={TIMEOUT}", f"processes=True, timeout={OF_PROCESSES}"],
    ids=["threads", "processes"],
)
def test_a_mesh_that_is_kept_from_cell_to_cell_is_stopped_and_its_next_use_says_so(
    cells: Cells, options: str
) -> None:
    cells.run(f"kept = local_mesh(2, {options})")
    cells.run("mesh = kept.__enter__()\nfound = mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2))")
    wait_between_cells()
    assert cells.variables["found"] == 2
    for use in ("mesh.run(0, max, 1, 2)", "kept.__exit__(None, None, None)"):
        with pytest.raises(MeshTimeout, match=FAILED):
            cells.run(use)
    cells.run("with local_mesh(2) as mesh: found = mesh.run(1, min, 1, 2)")
    assert cells.variables["found"] == 1


def hang() -> None:
    """Does nothing until it is interrupted."""
    time.sleep(SOON)
    raise AssertionError("not interrupted")


def provide() -> Iterator[Mesh]:
    with local_mesh(2, timeout=TIMEOUT) as mesh:
        yield mesh


def test_what_a_suspended_generator_has_entered_is_interrupted() -> None:
    """As by the fixtures of pytest."""
    fixture = provide()
    next(fixture)
    with pytest.raises(MeshTimeout, match=FAILED):
        hang()
    with pytest.raises(MeshTimeout, match=FAILED):
        next(fixture)


def test_a_generator_that_has_left_its_mesh_behind_is_not_interrupted() -> None:
    kept = []

    def leave_behind() -> Iterator[Mesh]:
        kept.append(local_mesh(2, timeout=TIMEOUT))
        yield kept[0].__enter__()

    [mesh] = leave_behind()
    wait_between_cells()
    with pytest.raises(MeshTimeout, match=FAILED):
        mesh.run(0, max, 1, 2)
    with pytest.raises(MeshTimeout, match=FAILED):
        kept[0].__exit__(None, None, None)


@contextlib.asynccontextmanager
async def async_context() -> AsyncIterator[Mesh]:
    with local_mesh(2, timeout=TIMEOUT) as mesh:
        yield mesh


async def in_with() -> None:
    with local_mesh(2, timeout=TIMEOUT):
        await asyncio.sleep(SOON)


async def in_async_with() -> None:
    async with async_context():
        await asyncio.sleep(SOON)


async def in_async_stack() -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(local_mesh(2, timeout=TIMEOUT))
        await asyncio.sleep(SOON)


@pytest.mark.parametrize("coroutine", [in_with, in_async_with, in_async_stack])
def test_only_the_coroutine_that_has_entered_is_interrupted(coroutine: Any) -> None:
    async def run() -> str:
        others = [asyncio.create_task(asyncio.sleep(2 * TIMEOUT, "on time")) for _ in range(2)]
        with pytest.raises(MeshTimeout, match=FAILED):
            await coroutine()
        return "".join(set(await asyncio.gather(*others)))

    assert asyncio.run(run()) == "on time"


def test_a_coroutine_that_blocks_its_loop_is_interrupted() -> None:
    async def run() -> None:
        with local_mesh(2, timeout=TIMEOUT):
            hang()

    with pytest.raises(MeshTimeout, match=FAILED):
        asyncio.run(run())


def test_the_earlier_deadline_of_an_outer_mesh_interrupts() -> None:
    outer, inner = local_mesh(2, timeout=TIMEOUT), local_mesh(2, timeout=60)
    with pytest.raises(MeshTimeout, match=FAILED), outer, inner:
        hang()


def test_meshes_that_end_in_any_order_leave_the_signal_as_it_was(cells: Cells) -> None:
    before = signal.getsignal(signal.SIGURG)
    cells.run("first, second = local_mesh(1, timeout=None), local_mesh(1, timeout=0)")
    cells.run("first.__enter__(); second.__enter__()")
    cells.run("first.__exit__(None, None, None)")
    cells.run("second.__exit__(None, None, None)")
    assert signal.getsignal(signal.SIGURG) == before


def test_a_mesh_whose_context_manager_was_dropped_says_so() -> None:
    mesh = local_mesh(1).__enter__()
    gc.collect()
    with pytest.raises(RuntimeError, match="nothing holds its context manager any more: use"):
        mesh.run(0, int)


@pytest.mark.filterwarnings("ignore:coroutine 'coroutine' was never awaited")
def test_the_report_of_a_hang_names_the_deadlock() -> None:
    with pytest.raises(MeshTimeout) as info, local_mesh(2, timeout=2) as mesh:
        mesh.run(0, zrpc.rpc_sync, "worker0", holds_up_its_loop)
    message = str(info.value)
    assert message.count("A circle of waiting over 2 workers: none of these can go on.") == 1
    assert "worker0 (rank 0): a coroutine, which runs coroutine for worker1 (rank 1)" in message
    assert message.index("A circle") < message.index("---- stacks of worker0")
