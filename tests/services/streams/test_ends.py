"""How streams end: by themselves, by their reader, by an error, a time-out."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

import zrpc
from tests.services.streams.conftest import Tap
from tests.support.gates import Gate
from tests.support.identity import here
from tests.support.targets import Unreadable
from tests.support.threads import assert_raised, start_all
from tests.support.waiting import SOON, until
from zrpc.services.streams.batches import dump_batch
from zrpc.testing import Mesh


def leave_loop(stream: Any) -> None:
    for _ in stream:
        break


def leave_loop_by_an_error(stream: Any) -> None:
    def read() -> None:
        for _ in stream:
            raise KeyError

    with pytest.raises(KeyError):
        read()


def leave_block(stream: Any) -> None:
    with stream:
        next(stream)


def leave_async_block(stream: Any) -> None:
    async def read() -> None:
        async with contextlib.aclosing(stream):
            await anext(stream)

    asyncio.run(read())


WAYS: list[Callable[[Any], None]] = [
    lambda stream: stream.close(),
    leave_loop,
    leave_loop_by_an_error,
    leave_block,
    leave_async_block,
]


def opened(workers: str) -> tuple[list[Tap], Any]:
    """Opens a stream of one worker, or of a group; with the generators that the test watches."""
    group = zrpc.group(workers)
    taps = [Tap() for _ in group]
    if len(group) == 1:
        return taps, zrpc.rpc_stream(workers, taps[0].run, prefetch=3)
    run = here(lambda tap: tap.run())
    return taps, zrpc.rpc_stream(group, run, args=(zrpc.each(taps),), prefetch=3)


@pytest.mark.parametrize("workers", ["worker0", "worker1", "worker*"])
def test_generators_are_closed_when_their_reader_leaves(caller: Mesh, workers: str) -> None:
    for leave in WAYS:
        taps, stream = opened(workers)
        for tap in taps:
            tap.await_made(3)
        leave(stream)
        for tap in taps:
            tap.await_close()
        assert list(stream) == []


@pytest.mark.parametrize("workers", ["worker1", "worker*"])
def test_generators_are_closed_when_their_stream_is_dropped(caller: Mesh, workers: str) -> None:
    for in_cycle in (False, True):
        taps, stream = opened(workers)
        for tap in taps:
            tap.await_made(1)  # one that has not begun never runs
        next(stream)
        if in_cycle:
            cycle = [stream]
            cycle.append(cycle)
            del cycle
        del stream
        if in_cycle:
            gc.collect()
        for tap in taps:
            tap.await_close()


@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_a_stream_that_is_closed_before_its_generator_begins_never_runs_it(
    caller: Mesh, gate: Gate
) -> None:
    tap, requests = Tap(), caller.agent(1).callee.requests
    future = zrpc.rpc_async("worker1", gate.work_inside)
    gate.await_entry()
    stream = zrpc.rpc_stream("worker1", tap.run)
    until(lambda: len(requests) == 2)
    stream.close()
    until(lambda: len(requests) == 1)
    gate.open()
    future.wait()
    assert zrpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    assert tap.made == 0


def test_what_an_async_generator_awaits_as_it_is_closed_is_not_cancelled(caller: Mesh) -> None:
    ends: list[type | None] = []

    async def run() -> AsyncIterator[int]:
        try:
            while True:
                yield 0
        finally:
            try:
                await asyncio.sleep(0.001)
            finally:
                ends.append(sys.exc_info()[0])

    for _ in range(50):
        with zrpc.rpc_stream("worker1", here(run), prefetch=1) as stream:
            next(stream)
    until(lambda: len(ends) == 50)
    assert set(ends) == {GeneratorExit}


def test_a_step_that_runs_goes_on_before_the_generator_is_closed(caller: Mesh) -> None:
    gate, notes, calls = Gate(), [], []

    def run() -> Iterator[int]:
        calls.append(zrpc.current_call())
        try:
            yield 0
            gate.work_inside()
            notes.append("went on")
            yield 1
        finally:
            notes.append("closed")

    stream = zrpc.rpc_stream("worker1", here(run))
    assert next(stream) == 0
    gate.await_entry()
    stream.close()
    until(lambda: calls[0].cancelled)
    assert notes == []
    gate.open()
    until(lambda: len(notes) == 2)
    assert notes == ["went on", "closed"]


def test_what_a_generator_does_wrong_as_it_is_closed_is_logged(
    caller: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    def run(stubborn: bool) -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            if stubborn:
                yield 1
            raise KeyError("in finally")

    for stubborn, text in ((True, "yielded while it was closed"), (False, "in finally")):
        stream = zrpc.rpc_stream("worker1", here(run), args=(stubborn,))
        assert next(stream) == 0
        stream.close()
        until(lambda text=text: text in caplog.text)


# -- errors --------------------------------------------------------------------------------------


def fails_after(n: int, error: BaseException) -> Iterator[int]:
    yield from range(n)
    raise error


def test_an_error_comes_after_the_items_before_it(caller: Mesh) -> None:
    for n in (0, 1, 1000):
        stream = zrpc.rpc_stream("worker1", fails_after, args=(n, KeyError("late")))
        found: list[int] = []
        for _ in range(2):  # also when it is asked again
            with pytest.raises(KeyError, match="late") as info:
                found.extend(stream)
        assert found == list(range(n))
        assert isinstance(info.value.__cause__, zrpc.RemoteError)
        assert "fails_after" in str(info.value.__cause__)


def test_a_generator_does_not_end_its_worker(caller: Mesh) -> None:
    with pytest.raises(zrpc.RemoteError, match="SystemExit"):
        list(zrpc.rpc_stream("worker1", fails_after, args=(0, SystemExit(3))))
    assert zrpc.rpc_sync("worker1", max, args=(1, 2)) == 2


def test_an_item_that_can_not_be_sent_or_read_ends_the_stream(caller: Mesh) -> None:
    for make, text in ((threading.Lock, "lock"), (Unreadable, "no number")):
        tap = Tap(lambda number, make=make: number if number < 3 else make())
        stream = zrpc.rpc_stream("worker1", tap.run)
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(zrpc.SerializationError, match=text):
            next(stream)
        tap.await_close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_as_a_batch_is_sent_ends_the_stream(caller: Mesh, asynchronous: bool) -> None:
    def fail(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is dump_batch.__code__:
            raise OverflowError("no room in the batch")  # which ends the profile of the thread

    def plain() -> Iterator[int]:
        yield 1
        sys.setprofile(fail)
        yield 2
        yield 3

    async def of_coroutine() -> AsyncIterator[int]:
        for item in plain():
            yield item

    generator = of_coroutine if asynchronous else plain
    stream = zrpc.rpc_stream("worker1", generator, timeout=SOON, prefetch=1)
    assert next(stream) == 1
    with pytest.raises(OverflowError, match="no room in the batch"):
        next(stream)


# -- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [1, 3])
def test_an_item_that_takes_too_long_ends_the_stream(caller: Mesh, readers: int) -> None:
    gate, closed = Gate(), threading.Event()

    def run() -> Iterator[int]:
        try:
            yield 0
            gate.wait_inside()
            yield 1
        finally:
            closed.set()

    stream = zrpc.rpc_stream("worker1", here(run), timeout=0.2)
    assert next(stream) == 0
    if readers > 1:  # there is always one that waits
        ended = start_all([partial(next, stream)] * readers, SOON)()
        assert_raised(ended, zrpc.RpcTimeoutError, "200 ms")
    for _ in range(2):
        with pytest.raises(
            zrpc.RpcTimeoutError, match=r"200 ms.*Here.*worker1.*for each item"
        ) as info:
            next(stream)
        assert info.value.__context__ is None  # it shows nothing of how items are kept
    gate.open()
    assert closed.wait(SOON)


def test_a_stream_has_a_deadline(caller: Mesh) -> None:
    tap = Tap()
    stream = zrpc.rpc_stream("worker1", tap.run, prefetch=2, deadline=0.3)
    tap.await_close()
    with pytest.raises(zrpc.RpcTimeoutError, match="300 ms"):
        list(stream)


def test_a_deadline_passes_while_the_reader_waits(caller: Mesh) -> None:
    gate = Gate()

    def run() -> Iterator[Any]:
        yield zrpc.current_call().time_remaining()
        gate.wait_inside()

    with gate:
        stream = zrpc.rpc_stream("worker1", here(run), deadline=0.4, timeout=SOON)
        assert 0 < next(stream) <= 0.4
        with pytest.raises(zrpc.RpcTimeoutError, match="400 ms"):
            next(stream)


@pytest.mark.zrpc(workers=3)
def test_a_stream_ends_with_the_handler_that_reads_it(caller: Mesh) -> None:
    tap, gate = Tap(), Gate()
    errors: list[BaseException] = []

    def read() -> None:
        stream = zrpc.rpc_stream("worker2", tap.run, prefetch=2)
        next(stream)
        gate.entered.release()
        try:
            while True:
                next(stream)
        except zrpc.RpcCancelledError as error:
            errors.append(error)

    future = zrpc.rpc_async("worker1", here(read))
    gate.await_entry()
    future.cancel()
    tap.await_close()
    until(lambda: errors)


# -- context -------------------------------------------------------------------------------------

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


def test_the_generator_runs_in_one_context_from_its_beginning_to_its_finally(caller: Mesh) -> None:
    last: list[Any] = []

    def run() -> Iterator[Any]:
        color.set("blue")
        try:
            for _ in range(10):
                yield color.get(), zrpc.current_call().caller.name, zrpc.get_worker_info().name
        finally:
            last.append((color.get(), zrpc.get_worker_info().name))

    stream = zrpc.rpc_stream("worker1", here(run), prefetch=1)
    for _ in range(5):
        assert next(stream) == ("blue", "worker0", "worker1")
    stream.close()
    until(lambda: last)
    assert last == [("blue", "worker1")]


def test_the_modes_of_torch_belong_to_the_generator(caller: Mesh) -> None:
    def run(mode: Any) -> Iterator[Any]:
        with mode():
            for _ in range(3):
                yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    for mode in (torch.no_grad, torch.inference_mode):
        stream = zrpc.rpc_stream("worker1", here(run), args=(mode,), prefetch=1)
        for _ in range(3):
            assert next(stream) == (False, mode is torch.inference_mode)
            assert zrpc.rpc_sync("worker1", torch.is_grad_enabled) is True
            assert zrpc.rpc_sync("worker1", torch.is_inference_mode_enabled) is False
        assert next(stream) == (True, False)


def no_generator() -> Iterator[int]:
    raise StopIteration


def test_a_function_that_raises_stop_iteration_has_failed(caller: Mesh) -> None:
    with pytest.raises(RuntimeError, match="no_generator raised StopIteration"):
        list(zrpc.rpc_stream("worker1", no_generator))


@pytest.mark.system
def test_a_reader_that_polls_takes_no_item_and_may_do_so_beyond_its_timeout(caller: Mesh) -> None:
    gate = Gate()

    def run() -> Iterator[int]:
        gate.wait_inside()
        yield from range(3)

    async def wait_in_vain(stream: Any) -> None:
        for _ in range(12):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.1)

    stream = zrpc.rpc_stream("worker1", here(run), timeout=1)
    gate.await_entry()
    asyncio.run(wait_in_vain(stream))
    gate.open()
    assert list(stream) == [0, 1, 2]


class Closing:
    """An item that closes a stream when it is freed."""

    stream: Any = None

    def __del__(self) -> None:
        if Closing.stream is not None:
            Closing.stream.close()


def test_an_item_may_close_its_stream_as_it_is_freed(caller: Mesh) -> None:
    tap = Tap(lambda number: Closing(), length=9)
    stream = zrpc.rpc_stream("worker1", tap.run, prefetch=20)
    tap.await_close()
    first = [next(stream), next(stream)]  # the rest has been opened
    Closing.stream = stream
    try:
        closer = threading.Thread(target=stream.close, daemon=True)
        closer.start()
        closer.join(SOON)
        assert not closer.is_alive()
    finally:
        Closing.stream = None
    assert len(first) == 2
