"""The thread that runs coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest

from tests.support.descriptors import few_descriptors
from tests.support.threads import no_more_threads
from tests.support.waiting import SOON
from zrpc.runtime.event_loop import EventLoop


@pytest.fixture
def loop(no_leaks: None) -> Iterator[EventLoop]:
    loop = EventLoop("test-loop", contextvars.Context())
    yield loop
    loop.close(SOON)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "test-loop"]


def run(loop: EventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs the coroutine and returns its result."""
    done, found = threading.Event(), []

    async def wrapped() -> None:
        try:
            found.append(await coroutine)
        finally:
            done.set()

    loop.run(wrapped(), contextvars.Context())
    assert done.wait(SOON)
    return found[0]


def begin(loop: EventLoop, coroutine: Any) -> None:
    """Runs a coroutine function until it sets the event that is its argument."""
    started = threading.Event()
    loop.run(coroutine(started), contextvars.Context())
    assert started.wait(SOON)


async def where() -> tuple[threading.Thread, asyncio.AbstractEventLoop]:
    return threading.current_thread(), asyncio.get_running_loop()


def test_close_cancels_coroutines_and_closes_async_generators(loop: EventLoop) -> None:
    ended, kept = [], []

    async def generate() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ended.append("generator")

    async def wait_long(started: threading.Event) -> None:
        kept.append(generate())
        await kept[0].__anext__()
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("coroutine")
            raise

    begin(loop, wait_long)
    loop.close(SOON)
    assert ended == ["coroutine", "generator"]
    assert threads() == []


def test_close_without_a_thread_and_twice_and_from_the_loop_itself(loop: EventLoop) -> None:
    other = EventLoop("test-loop", contextvars.Context())
    other.close(SOON)
    other.close(SOON)
    coroutine = where()
    with pytest.raises(RuntimeError, match="shutting down"):
        other.run(coroutine, contextvars.Context())
    coroutine.close()

    async def close() -> str:
        loop.close(SOON)
        return "closed"

    assert run(loop, close()) == "closed"
    for thread in threads():
        thread.join(SOON)
    assert threads() == []


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
    ended = []

    async def stop_forever(started: threading.Event) -> None:
        try:
            while True:
                asyncio.get_running_loop().stop()
                started.set()
                await asyncio.sleep(0)
        finally:
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
            ended.append(True)

    begin(loop, stop_forever)
    loop.close(SOON)
    assert ended == [True]
    assert threads() == []


def close_its_loop(loop: EventLoop) -> asyncio.AbstractEventLoop:
    """Closes the event loop, as only other code can: once it no longer runs."""
    thread, its = run(loop, where())
    its.call_soon_threadsafe(lambda: vars(its).update(run_forever=its.close))
    its.call_soon_threadsafe(its.stop)
    thread.join(SOON)
    assert its.is_closed()
    return its


def test_a_closed_loop_is_replaced(loop: EventLoop) -> None:
    assert close_its_loop(loop) is not run(loop, where())[1]
    close_its_loop(loop)
    loop.close(SOON)
    assert threads() == []


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of coroutines that nobody awaits
@pytest.mark.parametrize(
    ("refused", "text"),
    [(no_more_threads, "can't start new thread"), (few_descriptors, "Too many open files")],
    ids=["threads", "descriptors"],
)
def test_a_loop_that_the_system_refuses_is_started_later(
    loop: EventLoop, refused: Any, text: str
) -> None:
    """Otherwise all later coroutines would wait for a loop that nobody runs."""
    other = EventLoop("test-loop", contextvars.Context())
    with refused():
        for each in (loop, other):
            with pytest.raises((OSError, RuntimeError), match=text):
                each.run(where(), contextvars.Context())
    other.close(SOON)
    assert [run(loop, where())[0]] == threads()
