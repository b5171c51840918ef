"""Signals whose handlers interrupt any step of zrpc's code, and errors as any function begins."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.handled import signal_handlers
from tests.support.observed import stats_of
from tests.support.steps import (
    SHARES,
    STEPS,
    ThreadEntries,
    at_entry,
    at_step,
    drawn_steps,
    some_steps,
)
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh, local_mesh

pytestmark = pytest.mark.system  # they take some seconds in all

LARGE = torch.ones(100_000)
LIMIT = 1 << 20
_OPTIONS = {"rpc_timeout": 15, "max_bytes_in_flight": LIMIT}


class Counter:
    """The value of an RRef."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def sync() -> None:
    assert rpc.rpc_sync(1, echo, ("text",)) == "text"


def large_tensor() -> None:
    assert rpc.rpc_sync(1, torch.neg, (LARGE,)).sum() == -100_000


def by_value() -> None:
    assert rpc.rpc_sync(1, lambda x: x + 1, (1,)) == 2


def by_async() -> None:
    assert rpc.rpc_async(1, echo, ("text",)).wait() == "text"


def several() -> None:
    futures = [rpc.rpc_async(1, echo, (i,)) for i in range(3)]
    assert rpc.wait_all(futures) == [0, 1, 2]


def collected() -> None:
    futures = [rpc.rpc_async(1, echo, (i,)) for i in range(3)]
    assert rpc.collect_all(futures).wait() == futures
    assert {future.wait() for future in rpc.as_completed(futures)} == {0, 1, 2}


def in_callback() -> None:
    assert rpc.rpc_async(1, echo, (1,)).then(lambda future: future.wait() + 1).wait() == 2


def in_callback_beside() -> None:
    future = rpc.rpc_async(1, echo, (1,))
    after = future.then(lambda future: future.wait() + 1)
    try:
        assert future.wait() == 1
    finally:  # another thread may wait for it, whatever has happened to this one
        assert after.wait() == 2


def by_remote() -> None:
    rref = rpc.remote(1, Counter)
    assert rref.rpc_sync().add(2) == 2
    assert rref.to_here().count == 2


def with_rref() -> None:
    assert rpc.rpc_sync(1, lambda rref: rref.to_here(), (rpc.RRef([1]),)) == [1]


def with_rref_of_a_third() -> None:
    rref = rpc.remote(2, Counter)
    assert rpc.rpc_sync(1, lambda rref: rref.rpc_sync().add(1), (rref,)) == 1


def cancelled() -> None:
    rpc.rpc_async(1, time.sleep, (0.001,)).cancel()


def without_room() -> None:
    half = bytes(LIMIT // 2)
    futures = [rpc.rpc_async(1, echo, (half,)) for _ in range(3)]
    assert rpc.wait_all(futures) == [half] * 3


def in_context() -> None:
    with rpc.autograd.context() as context_id:
        leaf, factor = (torch.full((2,), n, requires_grad=True) for n in (1.0, 3.0))
        loss = rpc.rpc_sync(1, torch.mul, (leaf * factor, factor)).sum()
        rpc.autograd.backward(context_id, [loss])
        assert rpc.autograd.get_gradients(context_id)[leaf].tolist() == [9.0, 9.0]


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


def streamed() -> None:
    assert list(rpc.rpc_stream(1, numbers, (9,), prefetch=4)) == list(range(9))


def grouped() -> None:
    assert rpc.rpc_sync(rpc.group([0, 1]), max, (1, rpc.each([0, 2]))) == [1, 2]


def shared() -> None:
    assert rpc.rpc_sync(rpc.group([0, 1]), abs, (rpc.share([-1, -2, -3]),)) == [1, 2, 3]


def grouped_actors() -> None:
    counters = rpc.remote(rpc.group([0, 1]), rpc.actor(Counter))
    assert counters.rpc_sync().add(1) == [1, 1]
    counters.stop()


def queued() -> None:
    queue = rpc.remote(1, rpc.Queue)
    queue.rpc_sync().put("item")
    assert queue.rpc_sync().get() == "item"


def left_stream() -> None:
    with rpc.rpc_stream(1, numbers, (10**9,), prefetch=2) as stream:
        assert next(stream) == 0


WORK = [
    sync,
    large_tensor,
    by_value,
    several,
    collected,
    in_callback,
    in_callback_beside,
    by_remote,
    with_rref,
    cancelled,
    without_room,
    in_context,
    streamed,
    left_stream,
    grouped,
    shared,
    grouped_actors,
]
# By TCP, only the sending and the receiving are different.
OVER_TCP = [sync, large_tensor, several, cancelled, without_room]
each_work = pytest.mark.parametrize(
    ("_mesh", "work"),
    [*(("auto", work) for work in [*WORK, queued]), *(("tcp", work) for work in OVER_TCP)],
    indirect=["_mesh"],
)


@pytest.fixture(scope="module")
def _mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    options = {**_OPTIONS, "transport": request.param}
    with local_mesh(2, timeout=3600, options=options) as mesh:
        with mesh.agent(0).as_current():
            for work in [*WORK, queued]:  # opens the connections, for example
                work()
        yield mesh


@pytest.fixture
def mesh(_mesh: Mesh) -> Iterator[Mesh]:
    with _mesh.agent(0).as_current():
        yield _mesh


@pytest.fixture
def handle() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has a function called by the handler of SIGUSR1."""
    with signal_handlers() as handle:
        yield lambda function: handle(lambda *_: function())


@pytest.fixture(params=range(SHARES))
def steps_of(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """Returns the steps of a piece of work at which this test interrupts it."""
    return partial(some_steps, share=request.param)


def send() -> None:
    signal.raise_signal(signal.SIGUSR1)


def is_empty(mesh: Mesh) -> bool:
    stats = [stats_of(mesh, rank) for rank in range(2)]
    return not any(s.rrefs_owned or s.rrefs_held or s.autograd_contexts for s in stats)


def settles(mesh: Mesh) -> bool:
    stats = stats_of(mesh)
    in_flight = any(peer.bytes_in_flight for peer in stats.peers.values())
    idle = all(service.idle() for rank in range(2) for service in mesh.agent(rank).services)
    return idle and not stats.calls_in_flight and not in_flight


@each_work
def test_a_handler_calls_at_any_step(mesh: Mesh, handle: Any, steps_of: Any, work: Any) -> None:
    answered = []

    def call() -> None:
        for each in (sync, by_async, by_remote):
            each()
        answered.append(True)

    handle(call)
    for number in steps_of(work):
        answered.clear()
        with at_step(number, send) as steps:
            work()
        assert answered or not steps.place, steps.place
    assert until(lambda: settles(mesh))


class Interruption(Exception):
    """What the handler raises."""


def interrupt() -> None:
    raise Interruption


@each_work
def test_errors_of_handlers_pass_unchanged(
    mesh: Mesh, handle: Any, steps_of: Any, work: Any
) -> None:
    """The next call is as good as the first, and nothing of the interrupted one is left."""
    raised: list[Interruption] = []

    def fail() -> None:
        raised.append(Interruption())
        raise raised[0]

    handle(fail)
    for number in steps_of(work):
        found = None
        with at_step(number, send) as steps:
            try:
                work()
            except Interruption as error:
                found = error
        assert found is (raised[0] if steps.place else None), steps.place
        # Its frames hold a context that was interrupted as it began or ended.
        del found
        raised.clear()
        work()
    assert until(lambda: settles(mesh))


@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator")  # as one begins
@pytest.mark.parametrize("_mesh", ["auto"], indirect=True)
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_no_memory_for_a_function(
    mesh: Mesh, steps_of: Any, work: Any, error: type[Exception]
) -> None:
    """That work may fail. It ends, the next one is as good as the first, and nothing is left."""

    def fail() -> None:
        raise error

    def in_a_thread(number: int) -> None:
        with mesh.agent(0).as_current(), contextlib.suppress(Exception), at_entry(number, fail):
            work()

    for number in steps_of(work, at=at_entry):
        thread = threading.Thread(target=in_a_thread, args=(number,), daemon=True)
        thread.start()
        thread.join(SOON)
        assert not thread.is_alive(), number
        work()
    assert until(lambda: settles(mesh))


@pytest.mark.filterwarnings("ignore:Exception ignored in thread started")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("work", [*WORK, with_rref_of_a_third])
@pytest.mark.parametrize("worker", [0, 1])
def test_no_memory_or_stack_for_a_function_in_the_threads_of_a_worker(
    work: Callable[[], None], worker: int, share: int, caplog: pytest.LogCaptureFixture
) -> None:
    """That work may fail, but soon. The next one is as good as the first, and nothing is left.

    A mesh for each step, since Python ends the profile of a thread in which it has raised.
    """
    caplog.set_level(logging.CRITICAL, "zrpc")  # kept errors would refer to RRefs
    entries = ThreadEntries(f"zrpc-worker{worker}-")

    def interrupted(number: int) -> None:
        error = (MemoryError, RecursionError)[number % 2]
        size = 3 if work is with_rref_of_a_third else 2
        with entries.profiled(), local_mesh(size, timeout=3600, options=_OPTIONS) as mesh:

            def run() -> None:
                with mesh.agent(0).as_current(), contextlib.suppress(Exception):
                    work()

            run()
            thread = threading.Thread(target=run, daemon=True)
            with entries.at(number, error):
                thread.start()
                thread.join(SOON)
            assert not thread.is_alive(), entries.place
            with mesh.agent(0).as_current():
                work()
            gc.collect()  # the error refers to RRefs
            assert until(lambda: settles(mesh) and is_empty(mesh)), entries.place

    interrupted(0)
    for number in drawn_steps(entries.count, STEPS // 10, share):
        try:
            interrupted(number)
        except rpc.RendezvousError:
            # A thread of the mesh never began: Python 3.11 does not begin to profile two at once.
            interrupted(number)


@pytest.mark.parametrize("_mesh", ["auto"], indirect=True)
@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_a_stream_loses_no_item(mesh: Mesh, handle: Any, steps_of: Any, prefetch: int) -> None:
    def whole() -> None:
        stream = rpc.rpc_stream(1, numbers, (12,), prefetch=prefetch)
        assert [next(stream) for _ in range(12)] == list(range(12))

    handle(interrupt)
    for number in steps_of(whole):
        found: list[int] = []
        with rpc.rpc_stream(1, numbers, (12,), prefetch=prefetch) as stream:
            with at_step(number, send) as steps:
                while len(found) < 12:
                    with contextlib.suppress(Interruption):
                        found.append(next(stream))
            assert found == list(range(12)), steps.place
            assert next(stream, None) is None
    assert until(lambda: settles(mesh))


def test_an_agent_ends_in_spite_of_handlers(handle: Any, caplog: pytest.LogCaptureFixture) -> None:
    handle(interrupt)
    others = set(threading.enumerate())  # those of the module's mesh
    for number in range(10, 220, 10):
        with local_mesh(1) as mesh:
            agent = mesh.agent(0)
            assert mesh.run(0, rpc.rpc_sync, 0, echo, (1,)) == 1
            with contextlib.suppress(Interruption), at_step(number, send) as steps:
                agent.shutdown(graceful=False)
            agent.shutdown(graceful=False)
            alive = {each for each in threading.enumerate() if "-io-" in each.name}
            assert not alive - others, steps.place
    # A call that a handler has interrupted may fail as the agent ends, and is logged then.
    assert not [each for each in caplog.records if each.name != "zrpc.futures"]
