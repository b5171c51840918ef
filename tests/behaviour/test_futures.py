"""The Future of a call, and futures that the program completes itself."""

from __future__ import annotations

import contextlib
import copy
import gc
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


def test_it_is_a_torch_future(shared: Mesh) -> None:
    future = rpc.rpc_async(1, operator.add, (1, 2))
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, torch._C.Future)
    assert isinstance(future, rpc.Future)
    assert future.wait() == 3
    assert future.done()
    assert future.value() == 3


def stay() -> None:
    rpc.current_call().wait_cancelled(SOON)


def objects_of_calls(count: int) -> float:
    """Returns how many objects of the garbage collector's a call in flight is, with its future."""
    gc.collect()
    before = len(gc.get_objects())
    futures = [rpc.rpc_async(1, stay) for _ in range(count)]
    made = len(gc.get_objects()) - before
    for future in futures:
        future.cancel()
    return made / count


@pytest.mark.zrpc(processes=True)
def test_one_in_flight_is_few_objects_for_the_garbage_collector(mesh: Mesh) -> None:
    """The collector goes through all objects whenever many are new."""
    mesh.run(0, objects_of_calls, 10)
    assert mesh.run(0, objects_of_calls, 100) <= 12


def test_each_that_asks_gets_the_same_value_or_error(shared: Mesh) -> None:
    future = rpc.rpc_async(1, list, ("ab",))
    first = future.wait()
    assert future.wait() is future.value() is first
    failed = rpc.rpc_async(1, fail, (KeyError("k"),))
    for ask in [failed.wait, failed.wait, failed.value]:
        with pytest.raises(KeyError, match="k") as info:
            ask()
        assert "worker1" in str(info.value.__cause__)
    assert failed.done()


def test_torchs_wait_all_and_collect_all(shared: Mesh) -> None:
    with Gate() as gate:
        futures = [rpc.rpc_async(1, gate.wait_inside, (10,))]
        futures += [rpc.rpc_async(to, echo, (i,)) for i, to in enumerate([0, 1] * 5)]
        for future in futures[1:]:
            future.wait()
        plain: torch.futures.Future[int] = torch.futures.Future()
        collected = torch.futures.collect_all([*futures, plain])
        gate.open()
        assert torch.futures.wait_all(futures) == [10, *range(10)]
    assert not collected.done()

    def call_on(collected: torch.futures.Future[Any]) -> int:
        return rpc.rpc_sync(1, sum, ([f.wait() for f in collected.wait()],))

    then = collected.then(call_on)
    plain.set_result(1)
    assert then.wait() == 56
    assert torch.futures.wait_all([]) == []
    failed = [rpc.rpc_async(1, echo, (1,)), rpc.rpc_async(1, fail, (KeyError("k"),))]
    for collect in (
        torch.futures.wait_all,
        lambda futures: torch.futures.collect_all(futures).wait(),
    ):
        with pytest.raises(KeyError, match="k"):
            collect(failed)
    assert failed[0].wait() == 1


# -- futures of the program's own ------------------------------------------------------------


def test_set_result() -> None:
    future: rpc.Future[int] = rpc.Future()
    doubled = future.then(lambda f: f.wait() * 2)
    future.set_result(21)
    assert (future.wait(), doubled.wait()) == (21, 42)
    with pytest.raises(RuntimeError):
        future.set_result(1)


def test_set_exception_takes_exceptions_only() -> None:
    for what in (None, "error", 5):
        with pytest.raises(TypeError, match="Exception"):
            rpc.Future().set_exception(what)


def test_a_future_can_not_be_pickled(shared: Mesh) -> None:
    for future in [rpc.rpc_async(1, echo, (1,)), rpc.Future(), rpc.Future().then(print)]:
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            pickle.dumps(future)
        with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
            copy.deepcopy(future)


def test_a_future_and_its_result_are_freed(shared: Mesh) -> None:
    class Big:
        pass

    future = rpc.rpc_async(1, Big)
    gone, value_gone = threading.Event(), threading.Event()
    value = weakref.ref(future.wait(), lambda _: value_gone.set())
    alive = weakref.ref(future, lambda _: gone.set())
    assert value() is not None
    del future
    # The thread that has settled the call, and with that ended our wait, may have it for a moment.
    assert gone.wait(SOON), alive()
    assert value_gone.wait(SOON)


def test_a_future_that_is_never_completed_is_freed_with_its_callbacks() -> None:
    class Big:
        pass

    big, future = Big(), rpc.Future[int]()
    future.then(lambda _, big=big: big)
    future.add_done_callback(lambda _, big=big: None)
    gone = weakref.ref(big), weakref.ref(future)
    del big, future
    gc.collect()
    assert [each() for each in gone] == [None, None]


# -- futures of calls that the program completes itself --------------------------------------------

ALREADY = "Attempting to mark a completed Future as complete again"


def test_the_future_of_a_call_that_the_program_completes(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, ("answer",))
        doubled = future.then(lambda f: f.wait() * 2)
        gate.await_entry()
        future.set_result(7)
        assert future.done()
        assert doubled.value() == 14
        assert (future.wait(), future.value(), future.cancelled()) == (7, 7, False)
        assert not future.cancel()
        with pytest.raises(RuntimeError, match=ALREADY):
            future.set_exception(KeyError("k"))
        assert future.wait() == 7
        gate.open()
    assert rpc.rpc_sync(1, echo, (1,)) == 1  # the answer has come, and nobody heard of it
    assert future.wait() == 7


def test_a_thread_that_waits_for_a_call_gets_what_the_program_sets(
    shared: Mesh, gate: Gate
) -> None:
    future = rpc.rpc_async(1, gate.wait_inside, ("answer",))
    finish = start_all([future.wait] * 3, SOON)
    future.set_result("mine")
    assert finish() == ["mine"] * 3


def test_an_answer_that_has_come_is_kept(shared: Mesh) -> None:
    waited, not_waited = (rpc.rpc_async(1, echo, ("answer",)) for _ in range(2))
    waited.wait()
    until(not_waited.done)
    for future in (waited, not_waited):
        with pytest.raises(RuntimeError, match=ALREADY):
            future.set_result("mine")
        with pytest.raises(RuntimeError, match=ALREADY):
            future.set_exception(KeyError("mine"))
        assert future.wait() == "answer"


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


# -- many threads, one future ------------------------------------------------------------------


def test_many_threads_wait_for_one_future(shared: Mesh, gate: Gate) -> None:
    future = rpc.rpc_async(1, gate.wait_inside, (["x"],))
    ways: list[Callable[[], Any]] = [
        future.wait,
        lambda: torch.futures.wait_all([future])[0],
        lambda: future.then(lambda f: f.wait()).wait(),
    ]
    finish = start_all(ways * 4, SOON)
    gate.open()
    results = finish()
    assert results == [["x"]] * 12
    assert len({id(r) for r in results}) == 1  # it was unpickled once


# -- _wait_all -------------------------------------------------------------------------------


def test_wait_all_context(shared: Mesh) -> None:
    with Gate() as gate, rpc.api._wait_all():
        futures = [rpc.rpc_async(1, gate.wait_inside, (i,)) for i in range(3)]
        gate.open()
    assert all(f.done() for f in futures)
    with pytest.raises(KeyError, match="k"), rpc._wait_all():
        rpc.rpc_async(1, fail, (KeyError("k"),))


COMPLETIONS: dict[str, Callable[[rpc.Future[Any]], object]] = {
    "set_result": lambda future: future.set_result(1),
    "set_exception": lambda future: future.set_exception(ValueError("1")),
    "cancel": lambda future: future.cancel(),
}


@pytest.mark.parametrize("of_call", [False, True])
@pytest.mark.parametrize("complete", COMPLETIONS.values(), ids=COMPLETIONS)
def test_ctrl_c_leaves_no_future_that_nobody_can_complete(
    shared: Mesh, complete: Any, of_call: bool, gate: Gate
) -> None:
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


def calls_until(over: threading.Event) -> None:
    while not over.wait(0.0001):
        assert rpc.rpc_sync(0, echo, (1,), timeout=SOON) == 1


def test_after_waits_near_the_recursion_limit_the_worker_still_receives(mesh: Mesh) -> None:
    """A thread that makes one call after the other receives in place of the I/O thread."""
    over = threading.Event()
    calling = mesh.submit(1, calls_until, over)
    with mesh.agent(0).as_current():
        for left in 10 * [*range(5, 25)]:
            for _ in range(6):
                assert rpc.rpc_sync(1, echo, (left,), timeout=SOON) == left
            future = rpc.rpc_async(1, echo, (left,), timeout=SOON)
            call_with_frames_left(left, future.wait)
            assert future.wait() == left
    over.set()
    calling.result(SOON)
