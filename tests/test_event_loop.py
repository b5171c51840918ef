"""The thread that runs coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading

import pytest

from zrpc.event_loop import EventLoop

SOON = 5.0


@pytest.fixture
def loop(no_leaks):
    loop = EventLoop("test-loop", contextvars.Context())
    yield loop
    if not loop._closed:
        loop.close(SOON)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "test-loop"]


def run(loop, coroutine, context=None):
    """Runs it and returns what it returns."""
    done, found = threading.Event(), []

    async def wrapped():
        try:
            found.append(await coroutine)
        finally:
            done.set()

    loop.run(wrapped(), context or contextvars.Context())
    assert done.wait(SOON)
    return found[0]


async def where():
    return threading.current_thread(), asyncio.get_running_loop()


def test_there_is_no_thread_before_the_first_coroutine(loop):
    assert threads() == []
    run(loop, where())
    assert len(threads()) == 1


def test_all_coroutines_run_in_one_thread(loop):
    first, second = run(loop, where()), run(loop, where())
    assert first == second
    assert first[0] is not threading.current_thread()
    assert first[0].daemon


def test_coroutines_take_turns(loop):
    ready, go, order = threading.Event(), [], []

    async def wait():
        go.append(asyncio.Event())
        ready.set()
        await go[0].wait()
        order.append("waited")

    async def release():
        go[0].set()
        order.append("released")

    loop.run(wait(), contextvars.Context())
    assert ready.wait(SOON)
    run(loop, release())
    run(loop, asyncio.sleep(0))
    assert order == ["released", "waited"]


def test_a_coroutine_runs_in_its_context(loop):
    variable = contextvars.ContextVar("variable", default="unset")
    context = contextvars.Context()
    context.run(variable.set, "given")

    async def read():
        return variable.get()

    assert run(loop, read(), context) == "given"
    assert run(loop, read()) == "unset"


def test_tasks_live_though_nobody_refers_to_them(loop):
    # The loop's own references are weak: the garbage collector must not take them.
    started, go, done = threading.Event(), [], threading.Event()

    async def wait():
        future = asyncio.get_running_loop().create_future()
        go.append(future.set_result)
        del future
        started.set()
        await Forgotten(go)
        done.set()

    class Forgotten:
        def __init__(self, resume):
            self.future = asyncio.get_running_loop().create_future()
            resume[0] = self.future.set_result

        def __await__(self):
            return self.future.__await__()

    loop.run(wait(), contextvars.Context())
    assert started.wait(SOON)
    gc.collect()

    async def resume():
        go[0](None)

    run(loop, resume())
    assert done.wait(SOON)


def test_close_cancels_what_runs(loop):
    started, cancelled = threading.Event(), []

    async def wait_long():
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


def test_close_without_a_thread_and_twice(loop):
    loop.close(SOON)
    loop.close(SOON)
    coroutine = where()
    with pytest.raises(RuntimeError, match="shutting down"):
        loop.run(coroutine, contextvars.Context())
    coroutine.close()


def test_close_twice(loop):
    run(loop, where())
    loop.close(SOON)
    loop.close(SOON)


def test_close_from_the_loop_itself(loop):
    async def close():
        loop.close(SOON)
        return "closed"

    assert run(loop, close()) == "closed"
    [thread] = threads() or [None]
    if thread is not None:
        thread.join(SOON)
    assert threads() == []


def test_a_coroutine_stops_the_loop(loop):
    """It runs on, with what it had under way."""
    started, go, done = threading.Event(), [], threading.Event()

    async def wait():
        go.append(asyncio.Event())
        started.set()
        await go[0].wait()
        done.set()

    async def stop():
        asyncio.get_running_loop().stop()
        return threading.current_thread()

    async def release():
        go[0].set()
        return threading.current_thread()

    loop.run(wait(), contextvars.Context())
    assert started.wait(SOON)
    assert run(loop, stop()) is run(loop, release())
    assert done.wait(SOON)


def test_a_task_of_a_coroutine_ends_the_program(loop, caplog):
    async def leave():
        raise SystemExit(3)

    async def start():
        with pytest.raises(SystemExit):
            await asyncio.get_running_loop().create_task(leave())

    run(loop, start())
    assert len({run(loop, where()) for _ in range(2)}) == 1
    assert "test-loop goes on after SystemExit(3)" in caplog.text


def test_close_while_a_coroutine_stops_the_loop(loop):
    started, ended = threading.Event(), []

    async def stop_for_ever():
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


def test_a_loop_that_somebody_else_has_closed(loop):
    thread, its = run(loop, where())
    its.call_soon_threadsafe(lambda: setattr(its, "run_forever", its.close))
    its.call_soon_threadsafe(its.stop)
    thread.join(SOON)
    assert its.is_closed()
    assert run(loop, where())[1] is not its
    loop.close(SOON)


def test_close_after_somebody_else_has(loop):
    thread, its = run(loop, where())
    its.call_soon_threadsafe(lambda: setattr(its, "run_forever", its.close))
    its.call_soon_threadsafe(its.stop)
    thread.join(SOON)
    loop.close(SOON)
    assert threads() == []


def test_close_ends_async_generators(loop):
    ended = []

    async def generate():
        try:
            yield 1
            yield 2
        finally:
            ended.append(True)

    kept = []

    async def begin():
        kept.append(generate())
        return await kept[0].__anext__()

    assert run(loop, begin()) == 1
    loop.close(SOON)
    assert ended == [True]


def test_many_threads_start_coroutines(loop):
    found, lock = [], threading.Lock()

    def start(number):
        async def note():
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
