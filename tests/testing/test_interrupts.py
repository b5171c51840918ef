"""What happens to a function on a worker whose caller is interrupted, as by Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import pytest

import zrpc
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh


def interrupt_when(condition: Callable[[], object]) -> threading.Thread:
    """Sends this process a SIGINT once ``condition`` has returned and the main thread waits."""

    def send() -> None:
        condition()
        until(main_thread_waits)
        while main_thread_waits():
            # Again if it came just before the thread waited: that is seen only after the wait.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def main_thread_waits() -> bool:
    """Returns whether it waits for the work of a mesh."""
    ident = threading.main_thread().ident
    stack = traceback.walk_stack(sys._current_frames()[ident or 0])
    names = [frame.f_code.co_name for frame, _ in stack]
    return names[0] == "wait" and "results_of" in names


def begun(marker: str) -> Callable[[], object]:
    return lambda: until(lambda: os.path.exists(marker))


def touch_and_sleep(marker: str) -> None:
    open(marker, "w").close()
    time.sleep(SOON)


@pytest.mark.zrpc(processes=True)
def test_functions_in_all_processes_are_interrupted(mesh: Mesh, tmp_path: os.PathLike[str]) -> None:
    def of_rank() -> None:
        rank = zrpc.get_worker_info().rank
        touch_and_sleep(os.path.join(tmp_path, str(rank)))

    sender = interrupt_when(
        lambda: [begun(os.path.join(tmp_path, str(rank)))() for rank in range(2)]
    )
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        mesh.run_all(of_rank)
    sender.join()
    assert mesh.run_all(int, "1") == [1, 1]
    assert time.monotonic() - before < SOON


kinds = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


@kinds
def test_only_the_interrupted_function_is(
    make_mesh: MakeMesh, tmp_path: os.PathLike[str], processes: bool
) -> None:
    mesh = make_mesh(processes=processes)
    marker, release = (os.path.join(tmp_path, name) for name in ("begun", "release"))

    def until_released() -> str:
        open(marker, "w").close()
        begun(release)()
        return "not interrupted"

    first = mesh.submit(0, until_released)
    sender = interrupt_when(begun(marker))
    with pytest.raises(KeyboardInterrupt):
        mesh.run(0, os.mkdir, os.path.join(tmp_path, "never"))
    sender.join()
    last = mesh.submit(0, os.mkdir, os.path.join(tmp_path, "after"))
    open(release, "w").close()
    assert first.result(SOON) == "not interrupted"
    last.result(SOON)
    assert sorted(os.listdir(tmp_path)) == ["after", "begun", "release"]


def test_a_thread_goes_on_beside_what_its_worker_runs_next(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    started, release, ended = (threading.Event() for _ in range(3))

    def stuck() -> None:
        started.set()
        release.wait(SOON)
        ended.set()

    sender = interrupt_when(lambda: started.wait(SOON))
    with pytest.raises(KeyboardInterrupt):
        mesh.run(0, stuck)
    sender.join()
    assert mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2)) == 2
    assert "worker0 (a thread) still runs" in caplog.text
    assert "stuck, whose caller was interrupted" in caplog.text
    release.set()
    assert ended.wait(SOON)


@kinds
def test_async_functions_are_awaited_and_submitted_work_can_be(
    make_mesh: MakeMesh, processes: bool
) -> None:
    async def larger(first: int, second: int) -> int:
        return await zrpc.rpc_async("worker1", max, args=(first, second))

    async def failing() -> None:
        await asyncio.sleep(0)
        raise KeyError("reason")

    async def in_test() -> tuple[int, int]:
        return await mesh.submit(0, larger, 5, 6), await mesh.submit(1, max, 7, 8)

    mesh = make_mesh(2, processes=processes)
    assert mesh.run(0, larger, 1, 2) == 2
    assert mesh.run_all(larger, 3, 4) == [4, 4]
    assert asyncio.run(in_test()) == (6, 8)
    with pytest.raises(KeyError, match="reason"):
        mesh.run(0, failing)
