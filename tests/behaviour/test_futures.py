"""The Future of a call, futures that the program completes itself, several at once, and await."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import gc
import itertools
import operator
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.recursion import call_with_frames_left
from tests.support.settled import caught
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.targets import echo, fail
from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh


class Big:
    """What a test follows."""


def test_it_is_a_torch_future_with_one_value_or_error_for_all(shared: Mesh) -> None:
    future = rpc.rpc_async(1, list, ("ab",))
    for kind in (torch.futures.Future, torch._C.Future, rpc.Future):
        assert isinstance(future, kind)
    first = future.wait()
    assert future.wait() is future.value() is first
    failed = rpc.rpc_async(1, fail, (KeyError("k"),))
    for ask in [failed.wait, failed.wait, failed.value]:
        with pytest.raises(KeyError, match="k") as info:
            ask()
        assert "worker1" in str(info.value.__cause__)
    assert future.done()
    assert failed.done()


def objects_of_calls(count: int) -> float:
    """Returns how many objects of the garbage collector's a call in flight is, with its future."""
    gc.collect()
    before = len(gc.get_objects())
    futures = [rpc.rpc_async(1, lambda: rpc.current_call().wait_cancelled()) for _ in range(count)]
    made = len(gc.get_objects()) - before
    for future in futures:
        future.cancel()
    return made / count


@pytest.mark.zrpc(processes=True)
def test_one_in_flight_is_few_objects_for_the_garbage_collector(mesh: Mesh) -> None:
    """The collector goes through all objects whenever many are new."""
    mesh.run(0, objects_of_calls, 10)
    assert mesh.run(0, objects_of_calls, 100) <= 12


def test_a_future_can_not_be_pickled(shared: Mesh) -> None:
    for future in [rpc.rpc_async(1, echo, (1,)), rpc.Future(), rpc.Future().then(print)]:
        for copying in (pickle.dumps, copy.deepcopy):
            with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
                copying(future)


@pytest.mark.usefixtures("no_collections")
def test_futures_and_their_values_are_freed_without_the_collector(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, Big) for _ in range(3)]
    gone = [weakref.ref(each) for each in [*rpc.wait_all(futures), *futures]]
    assert gone[0]() is not None
    del futures
    # The thread that settled a call wakes the one that waits, and then drops the future.
    until(lambda: not any(ref() for ref in gone), "all are freed")


def test_a_future_that_is_never_completed_is_freed_with_its_callbacks() -> None:
    big, future = Big(), rpc.Future[int]()
    future.then(lambda _, big=big: big)
    future.add_done_callback(lambda _, big=big: None)
    gone = weakref.ref(big), weakref.ref(future)
    del big, future
    gc.collect()
    assert [each() for each in gone] == [None, None]


# -- that the program completes ----------------------------------------------------------------

ALREADY = "Attempting to mark a completed Future as complete again"


def check_complete(future: rpc.Future[Any], value: Any) -> None:
    """A future with a value can't be completed again, nor cancelled."""
    with pytest.raises(RuntimeError, match=ALREADY):
        future.set_result("again")
    with pytest.raises(RuntimeError, match=ALREADY):
        future.set_exception(KeyError("k"))
    assert not future.cancel()
    assert (future.wait(), future.value(), future.cancelled()) == (value, value, False)


def test_the_program_completes_a_future_of_its_own_or_of_a_call(shared: Mesh, gate: Gate) -> None:
    for what in (None, "error", 5):
        with pytest.raises(TypeError, match="Exception"):
            rpc.Future().set_exception(what)
    for future in (rpc.Future[Any](), rpc.rpc_async(1, gate.wait_inside, ("answer",))):
        with pytest.raises(RuntimeError, match=r"found a pending one: await it, or call .* wait"):
            future.value()
        doubled = future.then(lambda f: f.wait() * 2)
        finish = start_all([future.wait] * 3, SOON)
        future.set_result(7)
        assert finish() == [7] * 3
        assert doubled.value() == 14
        check_complete(future, 7)
    gate.await_entry()
    gate.open()
    assert rpc.rpc_sync(1, echo, (1,)) == 1  # the answer has come, and nobody heard of it
    check_complete(future, 7)


def test_an_answer_that_has_come_is_kept(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, ("answer",))
    until(future.done)
    check_complete(future, "answer")


def test_threads_race_to_complete_a_future() -> None:
    for _ in range(50):
        future: rpc.Future[int] = rpc.Future()
        together = threading.Barrier(4)

        def at_once(act: Callable[[], Any], together: Any = together) -> Any:
            together.wait(SOON)
            return act()

        acts: list[Callable[[], Any]] = [
            partial(future.set_exception, KeyError(0)),
            *(partial(future.set_result, number) for number in (1, 2)),
            future.wait,
        ]
        *outcomes, waited = start_all([partial(at_once, act) for act in acts], SOON)()
        [won] = [number for number, outcome in enumerate(outcomes) if outcome is None]
        assert isinstance(waited, KeyError) if won == 0 else waited == won
        assert caught(future) is KeyError if won == 0 else future.value() == won


def test_a_future_of_then_that_the_program_completes() -> None:
    first: rpc.Future[int] = rpc.Future()
    ran: list[int] = []
    value = first.then(lambda f: ran.append(f.wait()))
    error = first.then(lambda f: fail(KeyError("k")))
    value.set_result(None)
    error.set_result("mine")
    first.set_result(1)
    assert ran == [1]
    assert (value.wait(), error.wait()) == (None, "mine")


COMPLETIONS: dict[str, Callable[[rpc.Future[Any]], object]] = {
    "set_result": lambda future: future.set_result(1),
    "set_exception": lambda future: future.set_exception(ValueError("1")),
    "cancel": lambda future: future.cancel(),
}


@pytest.mark.parametrize("of_call", [False, True])
@pytest.mark.parametrize("complete", COMPLETIONS.values(), ids=COMPLETIONS)
def test_ctrl_c_loses_no_future(shared: Mesh, complete: Any, of_call: bool, gate: Gate) -> None:
    """Other threads may wait for it."""

    def run(number: int) -> None:
        future = rpc.rpc_async(1, gate.wait_inside) if of_call else rpc.Future()
        with at_step(number, interrupt), contextlib.suppress(KeyboardInterrupt):
            complete(future)
        if not future.done():
            future.set_result(2)  # nobody has claimed it
        assert future.done()

    for number in some_steps(lambda: run(0)):
        run(number)


# -- many threads --------------------------------------------------------------------------------


def test_many_threads_wait_for_one_future(shared: Mesh, gate: Gate) -> None:
    future = rpc.rpc_async(1, gate.wait_inside, (["x"],))

    async def main() -> Any:
        return await future

    ways: list[Callable[[], Any]] = [
        future.wait,
        lambda: torch.futures.wait_all([future])[0],
        lambda: future.then(lambda f: f.wait()).wait(),
        lambda: asyncio.run(main()),  # each has a loop of its own
    ]
    finish = start_all(ways * 4, SOON)
    gate.open()
    results = finish()
    assert results == [["x"]] * 16
    assert len({id(r) for r in results}) == 1  # it was unpickled once


def calls_until(over: threading.Event) -> None:
    while not over.wait(0.0001):
        assert rpc.rpc_sync(0, echo, (1,), timeout=SOON) == 1


def test_after_waits_near_the_recursion_limit_the_worker_still_receives(caller: Mesh) -> None:
    """A thread that makes one call after the other receives in place of the I/O thread."""
    over = threading.Event()
    calling = caller.submit(1, calls_until, over)
    for left in 10 * [*range(5, 25)]:
        for _ in range(6):
            assert rpc.rpc_sync(1, echo, (left,), timeout=SOON) == left
        future = rpc.rpc_async(1, echo, (left,), timeout=SOON)
        call_with_frames_left(left, future.wait)
        assert future.wait() == left
    over.set()
    calling.result(SOON)


# -- several at once -----------------------------------------------------------------------------


def test_all_are_waited_for_in_their_order_also_those_of_torch(shared: Mesh) -> None:
    with Gate() as gate:
        plain: torch.futures.Future[Any] = torch.futures.Future()
        futures = [rpc.rpc_async(1, gate.wait_inside, (10,)), plain]
        futures += [rpc.rpc_async(to, echo, (i,)) for i, to in enumerate([0, 1] * 5)]
        collected = [each.collect_all(futures) for each in (rpc, torch.futures)]
        # A callback of torch's collection may make calls.
        thens = [
            each.then(lambda c: rpc.rpc_sync(1, sum, ([f.wait() for f in c.wait()],)))
            for each in collected
        ]
        for future in futures[2:]:
            future.wait()
        gate.open()
    futures[0].wait()
    assert not any(each.done() for each in collected)
    threading.Timer(0.01, contextvars.copy_context().run, (plain.set_result, 11)).start()
    assert rpc.wait_all(futures, timeout=SOON) == [10, 11, *range(10)]
    assert torch.futures.wait_all(futures) == [10, 11, *range(10)]
    assert [then.wait() for then in thens] == [66, 66]


def test_the_first_error_ends_the_wait_while_other_calls_go_on(shared: Mesh) -> None:
    for wait in (rpc.wait_all, lambda futures: rpc.collect_all(futures).wait()):
        with Gate() as gate:
            slow = rpc.rpc_async(1, gate.wait_inside, (1,))
            failed = [slow, rpc.rpc_async(1, fail, (KeyError("k"),))]
            with pytest.raises(KeyError, match="k") as info:
                wait(failed)
            assert "worker1" in str(info.value.__cause__)
            assert not slow.done()
            gate.open()
            assert slow.wait() == 1
    for wait in (torch.futures.wait_all, lambda f: torch.futures.collect_all(f).wait()):
        with pytest.raises(KeyError, match="k"):
            wait(failed)


def test_wait_all_gives_up_after_its_timeout(shared: Mesh, gate: Gate) -> None:
    slow = rpc.rpc_async(1, gate.wait_inside, (1,))
    quick = rpc.rpc_async(1, echo, (2,))
    quick.wait()
    with pytest.raises(rpc.RpcTimeoutError, match=r"done within 0\.05 s, but 1 of them"):
        rpc.wait_all([slow, quick], timeout=0.05)


def test_as_completed_gives_each_future_when_it_is_done_or_has_failed(shared: Mesh) -> None:
    with Gate() as first, Gate() as second:
        futures = [rpc.rpc_async(1, gate.wait_inside) for gate in (first, second)]
        futures += [rpc.rpc_async(1, fail, (KeyError("k"),)), rpc.Future()]
        done = rpc.as_completed(futures, timeout=SOON)
        assert next(done) is futures[2]
        assert caught(futures[2]) is KeyError
        futures[3].cancel()
        assert next(done) is futures[3]
        second.open()
        assert next(done) is futures[1]
        first.open()
        assert list(done) == [futures[0]]


def test_no_futures_one_twice_one_that_is_cancelled_and_what_is_none(shared: Mesh) -> None:
    assert rpc.wait_all([]) == rpc.collect_all([]).wait() == list(rpc.as_completed([])) == []
    assert torch.futures.wait_all([]) == []
    future = rpc.rpc_async(1, echo, (1,))
    assert rpc.wait_all([future, future]) == [1, 1]
    assert rpc.collect_all([future, future]).wait() == [future, future]
    pending = rpc.Future[Any]()
    collected = rpc.collect_all([pending])
    assert collected.cancel()
    assert not pending.done()
    with pytest.raises(rpc.RpcCancelledError):
        collected.wait()
    text = r"expected torch\.futures\.Future .* int at position 1"
    for take in (rpc.wait_all, rpc.collect_all, rpc.as_completed):
        with pytest.raises(TypeError, match=text):
            take([future, 1])


def test_the_calls_of_a_block_are_waited_for(shared: Mesh) -> None:
    with Gate() as gate, rpc.api._wait_all():
        futures = [rpc.rpc_async(1, gate.wait_inside, (i,)) for i in range(3)]
        gate.open()
    assert all(f.done() for f in futures)
    with pytest.raises(KeyError, match="k"), rpc._wait_all():
        rpc.rpc_async(1, fail, (KeyError("k"),))


def test_ctrl_c_leaves_the_other_futures_to_the_next_call() -> None:
    for number in itertools.count(1):
        futures: list[rpc.Future[int]] = [rpc.Future() for _ in range(2)]
        arriving = rpc.as_completed(futures, timeout=5)
        futures[0].set_result(0)
        with at_step(number, interrupt) as steps, contextlib.suppress(KeyboardInterrupt):
            next(arriving)
        if not steps.place:
            break
        futures[1].set_result(1)
        assert futures[1] in list(arriving)
    assert number > 3


# -- in asyncio ----------------------------------------------------------------------------------


def test_await_holds_up_no_loop_and_goes_on_after_a_time_out(shared: Mesh, gate: Gate) -> None:
    future = rpc.rpc_async(1, gate.wait_inside, ("answer",))

    async def wait_in_a_loop_that_closes() -> Any:
        waiting = future.__await__()
        next(waiting)
        return waiting

    async def main() -> Any:
        order: list[str] = []

        async def waits() -> None:
            order.append(await future)

        task = asyncio.ensure_future(waits())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), 0.01)
        with pytest.raises(TypeError, match="give it ensure_future"):
            await asyncio.wait([future])
        order.append("the loop runs")
        gate.open()
        await asyncio.wait_for(task, SOON)
        collected = rpc.collect_all([rpc.rpc_async(1, operator.add, (1, 2)), future])
        return order, [each.wait() for each in await collected]

    waiting = asyncio.run(wait_in_a_loop_that_closes())
    assert asyncio.run(main()) == (["the loop runs", "answer"], [3, "answer"])
    waiting.close()


async def first_of_two(future: rpc.Future[Any]) -> Any:
    return (await asyncio.gather(future, future))[0]


async def waited_for(future: rpc.Future[Any]) -> Any:
    found, left = await asyncio.wait([future], timeout=SOON)
    assert (found, left) == ({future}, set())
    return await future


WAYS: list[Callable[[rpc.Future[Any]], Any]] = [
    first_of_two,
    waited_for,
    lambda future: asyncio.wait_for(future, 0),
    asyncio.shield,
    lambda future: next(iter(asyncio.as_completed([future]))),
]


def test_a_pending_future_has_neither_result_nor_exception(shared: Mesh, gate: Gate) -> None:
    for future in (rpc.Future[int](), rpc.rpc_async(1, gate.wait_inside)):
        for ask in (future.result, future.exception):
            with pytest.raises(asyncio.InvalidStateError, match=r"pending one: await it, or call"):
                ask()
    gate.open()
    future.wait()
    assert (future.result(), future.exception()) == (None, None)


def test_asyncio_gets_the_value_of_a_future_that_is_done_and_its_error(shared: Mesh) -> None:
    async def main(ask: Callable[[rpc.Future[Any]], Any]) -> list[Any]:
        with pytest.raises(KeyError):
            await ask(bad)
        order = [await ask(done)]
        asyncio.get_running_loop().call_soon(order.append, "a turn")
        order.append(await done)  # without a turn of the loop
        await asyncio.sleep(0)
        return order

    done, bad = rpc.rpc_async(1, echo, (7,)), rpc.Future[Any]()
    done.wait()
    bad.set_exception(KeyError("k"))
    for ask in WAYS:
        assert asyncio.run(main(ask)) == [7, 7, "a turn"]
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        assert loop.run_until_complete(done) == 7


def test_a_time_out_ends_the_gather_of_a_future_that_is_done(shared: Mesh, gate: Gate) -> None:
    async def main() -> None:
        for done in (rpc.rpc_async(1, echo, (7,)), rpc.rpc_async(rpc.group([0, 1]), echo, (7,))):
            done.wait()
            pending = rpc.rpc_async(1, gate.wait_inside)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.gather(done, pending)
            assert pending.cancelled()

    asyncio.run(main())
    gate.open()


def test_gather_ends_with_a_call_that_has_raised_stop_iteration(shared: Mesh) -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(stopped), SOON)

    stopped = rpc.rpc_async(1, next, (iter(()),))
    until(stopped.done)
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(main())
