"""The thread that runs coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest

from zrpc.runtime.event_loop import EventLoop

SOON = 5.0


@pytest.fixture
def loop(no_leaks: None) -> Iterator[EventLoop]:
    loop = EventLoop("test-loop", contextvars.Context())
    yield loop
    if not loop._closed:
        loop.close(SOON)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "test-loop"]


def run(
    loop: EventLoop, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
) -> Any:
    """Runs the coroutine and returns its result."""
    done, found = threading.Event(), []

    async def wrapped() -> None:
        try:
            found.append(await coroutine)
        finally:
            done.set()

    loop.run(wrapped(), context or contextvars.Context())
    assert done.wait(SOON)
    return found[0]


async def where() -> tuple[threading.Thread, asyncio.AbstractEventLoop]:
    return threading.current_thread(), asyncio.get_running_loop()


def test_there_is_no_thread_before_the_first_coroutine(loop: EventLoop) -> None:
    assert threads() == []
    run(loop, where())
    assert len(threads()) == 1


def test_all_coroutines_run_in_one_thread(loop: EventLoop) -> None:
    first, second = run(loop, where()), run(loop, where())
    assert first == second
    assert first[0] is not threading.current_thread()
    assert first[0].daemon


def test_coroutines_take_turns(loop: EventLoop) -> None:
    ready, go, order = threading.Event(), [], []

    async def wait() -> None:
        go.append(asyncio.Event())
        ready.set()
        await go[0].wait()
        order.append("waited")

    async def release() -> threading.Thread:
        go[0].set()
        order.append("released")

    loop.run(wait(), contextvars.Context())
    assert ready.wait(SOON)
    run(loop, release())
    run(loop, asyncio.sleep(0))
    assert order == ["released", "waited"]


def test_a_coroutine_runs_in_its_context(loop: EventLoop) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    context = contextvars.Context()
    context.run(variable.set, "given")

    async def read() -> str:
        return variable.get()

    assert run(loop, read(), context) == "given"
    assert run(loop, read()) == "unset"


def test_running_tasks_are_not_garbage_collected(loop: EventLoop) -> None:
    # The loop's own references are weak.
    started, go, done = threading.Event(), [], threading.Event()

    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        go.append(future.set_result)
        del future
        started.set()
        await Forgotten(go)
        done.set()

    class Forgotten:
        def __init__(self, resume: list[Callable[[Any], None]]) -> None:
            self.future = asyncio.get_running_loop().create_future()
            resume[0] = self.future.set_result

        def __await__(self) -> Generator[Any, None, Any]:
            return self.future.__await__()

    loop.run(wait(), contextvars.Context())
    assert started.wait(SOON)
    gc.collect()

    async def resume() -> None:
        go[0](None)

    run(loop, resume())
    assert done.wait(SOON)


def test_close_cancels_running_coroutines(loop: EventLoop) -> None:
    started, cancelled = threading.Event(), []

    async def wait_long() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    loop.run(wait_long(), contextvars.Context())
    assert started.wait(SOON)
    loop.close(SOON)
    assert cancelled == [True]
    assert threads() == []


def test_close_without_a_thread_and_twice(loop: EventLoop) -> None:
    loop.close(SOON)
    loop.close(SOON)
    coroutine = where()
    with pytest.raises(RuntimeError, match="shutting down"):
        loop.run(coroutine, contextvars.Context())
    coroutine.close()


def test_close_twice(loop: EventLoop) -> None:
    run(loop, where())
    loop.close(SOON)
    loop.close(SOON)


def test_close_from_the_loop_itself(loop: EventLoop) -> None:
    async def close() -> str:
        loop.close(SOON)
        return "closed"

    assert run(loop, close()) == "closed"
    [thread] = threads() or [None]
    if thread is not None:
        thread.join(SOON)
    assert threads() == []


def test_the_loop_continues_after_a_coroutine_stops_it(loop: EventLoop) -> None:
    started, go, done = threading.Event(), [], threading.Event()

    async def wait() -> None:
        go.append(asyncio.Event())
        started.set()
        await go[0].wait()
        done.set()

    async def stop() -> threading.Thread:
        asyncio.get_running_loop().stop()
        return threading.current_thread()

    async def release() -> threading.Thread:
        go[0].set()
        return threading.current_thread()

    loop.run(wait(), contextvars.Context())
    assert started.wait(SOON)
    assert run(loop, stop()) is run(loop, release())
    assert done.wait(SOON)


def test_the_loop_survives_system_exit_in_a_task(
    loop: EventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def start() -> None:
        with pytest.raises(SystemExit):
            await asyncio.get_running_loop().create_task(leave())

    run(loop, start())
    assert len({run(loop, where()) for _ in range(2)}) == 1
    assert "test-loop goes on after SystemExit(3)" in caplog.text


def test_close_while_a_coroutine_stops_the_loop(loop: EventLoop) -> None:
    started, ended = threading.Event(), []

    async def stop_for_ever() -> None:
        try:
            while True:
                asyncio.get_running_loop().stop()
                started.set()
                await asyncio.sleep(0)
        finally:
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
            ended.append(True)

    loop.run(stop_for_ever(), contextvars.Context())
    assert started.wait(SOON)
    loop.close(SOON)
    assert ended == [True]
    assert threads() == []


def test_a_closed_loop_is_replaced(loop: EventLoop) -> None:
    thread, its = run(loop, where())
    its.call_soon_threadsafe(lambda: setattr(its, "run_forever", its.close))
    its.call_soon_threadsafe(its.stop)
    thread.join(SOON)
    assert its.is_closed()
    assert run(loop, where())[1] is not its
    loop.close(SOON)


def run_without_a_thread(loop: EventLoop, patch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def never() -> None:
        pass

    coroutine = never()
    patch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        loop.run(coroutine, contextvars.Context())
    coroutine.close()


def test_a_thread_that_the_system_refuses_is_started_later(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all later coroutines would wait for a loop that nobody runs."""
    with monkeypatch.context() as patch:
        run_without_a_thread(loop, patch)
    thread, _ = run(loop, where())
    assert [thread] == threads()


def test_close_after_the_system_has_refused_a_thread(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_a_thread(loop, monkeypatch)
    loop.close(SOON)


def test_close_after_the_loop_was_closed(loop: EventLoop) -> None:
    thread, its = run(loop, where())
    its.call_soon_threadsafe(lambda: setattr(its, "run_forever", its.close))
    its.call_soon_threadsafe(its.stop)
    thread.join(SOON)
    loop.close(SOON)
    assert threads() == []


def test_close_closes_async_generators(loop: EventLoop) -> None:
    ended = []

    async def generate() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            ended.append(True)

    kept = []

    async def begin() -> int:
        kept.append(generate())
        return await kept[0].__anext__()

    assert run(loop, begin()) == 1
    loop.close(SOON)
    assert ended == [True]


def test_many_threads_start_coroutines(loop: EventLoop) -> None:
    found, lock = [], threading.Lock()

    def start(number: int) -> None:
        async def note() -> None:
            await asyncio.sleep(0)
            with lock:
                found.append(number)

        for _ in range(25):
            run(loop, note())

    starters = [threading.Thread(target=start, args=(n,)) for n in range(4)]
    for thread in starters:
        thread.start()
    for thread in starters:
        thread.join()
    assert sorted(found) == sorted([0, 1, 2, 3] * 25)
    assert len(threads()) == 1
