"""The Future of a call, and futures that the program completes itself."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import operator
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.ctrl_c import ctrl_c_at
from tests.support.gates import Gate
from tests.support.pending import entered_call, table
from tests.support.settled import Calling, caught, settled_in_wait
from tests.support.targets import echo, fail
from tests.support.waiting import SOON
from zrpc.testing import Mesh


def test_it_is_a_torch_future(shared: Mesh) -> None:
    future = rpc.rpc_async(1, operator.add, (1, 2))
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, torch._C.Future)
    assert isinstance(future, rpc.Future)
    assert future.wait() == 3
    assert future.done()
    assert future.value() == 3


def test_one_in_flight_is_few_objects_for_the_garbage_collector() -> None:
    """The collector goes through all objects whenever many are new."""
    calls, calling = table(), Calling()

    def make() -> rpc.Future[Any]:
        return rpc.Future.of_call(entered_call(calls, peer=0, timeout=60), calling)

    futures = [make()]
    gc.collect()
    before = len(gc.get_objects())
    futures += [make() for _ in range(100)]
    # The call, the future and a gate of each.
    assert len(gc.get_objects()) - before <= 4 * 100


def test_wait_again_and_again(shared: Mesh) -> None:
    future = rpc.rpc_async(1, list, ("ab",))
    first = future.wait()
    assert future.wait() is first
    assert future.value() is first


def test_an_error_is_raised_again_and_again(shared: Mesh) -> None:
    future = rpc.rpc_async(1, fail, (KeyError("k"),))
    for ask in [future.wait, future.wait, future.value]:
        with pytest.raises(KeyError, match="k") as info:
            ask()
        assert "worker1" in str(info.value.__cause__)
    assert future.done()


def test_done_and_value_before_the_end(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, (5,))
        assert not future.done()
        with pytest.raises(RuntimeError):
            future.value()
        gate.open()
        assert future.wait() == 5
        assert future.done()


def test_wait_all_keeps_the_order(shared: Mesh) -> None:
    with Gate() as gate:
        futures = [rpc.rpc_async(1, gate.wait_inside, ("slow",))]
        futures += [rpc.rpc_async(to, echo, (i,)) for i, to in enumerate([0, 1] * 5)]
        for future in futures[1:]:
            future.wait()
        gate.open()
        assert torch.futures.wait_all(futures) == ["slow", *range(10)]


def test_wait_all_of_none() -> None:
    assert torch.futures.wait_all([]) == []


def test_wait_all_raises_the_callees_error(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, echo, (1,)), rpc.rpc_async(1, fail, (KeyError("k"),))]
    with pytest.raises(KeyError, match="k"):
        torch.futures.wait_all(futures)
    assert futures[0].wait() == 1


def test_collect_all_then_call_on(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, operator.mul, (i, i)) for i in range(5)]

    def call_on(collected: torch.futures.Future[Any]) -> int:
        return rpc.rpc_sync(1, sum, ([f.wait() for f in collected.wait()],))

    assert torch.futures.collect_all(futures).then(call_on).wait() == 30


def test_collect_all_with_torch_futures_among_them(shared: Mesh) -> None:
    plain: torch.futures.Future[int] = torch.futures.Future()
    collected = torch.futures.collect_all([rpc.rpc_async(1, echo, (1,)), plain])
    assert not collected.done()
    plain.set_result(2)
    assert [f.wait() for f in collected.wait()] == [1, 2]


def test_collect_all_with_an_error_among_them(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, fail, (KeyError("k"),)), rpc.rpc_async(1, echo, (1,))]
    with pytest.raises(KeyError, match="k"):  # as torch's own futures do
        torch.futures.collect_all(futures).wait()
    assert futures[1].wait() == 1


# -- futures of the program's own ------------------------------------------------------------


def test_set_result() -> None:
    future: rpc.Future[int] = rpc.Future()
    doubled = future.then(lambda f: f.wait() * 2)
    future.set_result(21)
    assert (future.wait(), doubled.wait()) == (21, 42)
    with pytest.raises(RuntimeError):
        future.set_result(1)


def test_set_exception() -> None:
    future: rpc.Future[int] = rpc.Future()
    future.set_exception(KeyError("k"))
    assert future.done()
    for _ in range(2):
        with pytest.raises(KeyError, match="k"):
            future.wait()
    with pytest.raises(KeyError, match="k"):
        future.value()


@pytest.mark.parametrize("what", [None, "error", 5])
def test_set_exception_takes_exceptions_only(what: Any) -> None:
    with pytest.raises(TypeError, match="Exception"):
        rpc.Future().set_exception(what)


def test_set_result_wakes_waiting_threads() -> None:
    future: rpc.Future[int] = rpc.Future()
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    future.set_result(1)
    for thread in threads:
        thread.join(SOON)
    assert results == [1] * 4


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


def test_the_future_of_a_call_that_the_program_fails(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, ("answer",))
        future.set_exception(KeyError("mine"))
        with pytest.raises(KeyError, match="mine"):
            future.wait()
        with pytest.raises(RuntimeError, match=ALREADY):
            future.set_result(1)


def test_a_thread_that_waits_for_a_call_gets_what_the_program_sets(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, ("answer",))
        call = future._call
        assert call is not None
        results: list[Any] = []
        threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(3)]
        for thread in threads:
            thread.start()
        future.set_result("mine")
        for thread in threads:
            thread.join(SOON)
        assert results == ["mine"] * 3


def test_an_answer_that_has_come_is_kept(shared: Mesh) -> None:
    future = settled_in_wait("answer")
    assert future.wait() == "answer"
    for complete in (future.set_result, lambda _: future.set_exception(KeyError("mine"))):
        with pytest.raises(RuntimeError, match=ALREADY):
            complete("mine")
    assert future.wait() == "answer"


def test_a_call_that_is_settled_but_not_decoded_yet() -> None:
    jobs: list[Callable[[], None]] = []
    call = entered_call(table(), peer=0, timeout=SOON)
    future = rpc.Future.of_call(call, Calling(complete=jobs.append))
    call.fail("answer")
    with pytest.raises(RuntimeError, match=ALREADY):
        future.set_result("mine")
    jobs.pop()()
    assert future.wait() == "answer"


def test_answers_and_the_program_race(shared: Mesh) -> None:
    for _ in range(100):
        future = rpc.rpc_async(1, echo, ("answer",))
        try:
            future.set_result("mine")
        except RuntimeError as error:
            assert ALREADY in str(error)  # noqa: PT017 - only one of them wins, either way
            assert future.wait() == "answer"
        else:
            assert future.wait() == "mine"


def test_threads_race_to_complete_a_future() -> None:
    for _ in range(50):
        future: rpc.Future[int] = rpc.Future()
        won: list[int] = []
        barrier = threading.Barrier(4)

        def complete(number: int, future: Any = future, won: Any = won, at: Any = barrier) -> None:
            at.wait(SOON)
            try:
                future.set_exception(KeyError(0)) if number == 0 else future.set_result(number)
            except RuntimeError:
                return
            won.append(number)

        threads = [threading.Thread(target=complete, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait(SOON)
        with contextlib.suppress(KeyError):
            future.wait()
        for thread in threads:
            thread.join(SOON)
        assert len(won) == 1
        assert (caught(future) is KeyError) == (won == [0])
        assert caught(future) or [future.value()] == won


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


def test_many_threads_wait_for_one_future(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, (["x"],))
        results: list[Any] = []
        ways = [future.wait, lambda: torch.futures.wait_all([future])[0]]
        ways.append(lambda: future.then(lambda f: f.wait()).wait())
        threads = [threading.Thread(target=lambda w=w: results.append(w())) for w in ways * 4]
        for thread in threads:
            thread.start()
        gate.open()
        for thread in threads:
            thread.join(SOON)
        assert results == [["x"]] * 12
        assert len({id(r) for r in results}) == 1  # it was unpickled once


# -- _wait_all -------------------------------------------------------------------------------


def test_wait_all_context(shared: Mesh) -> None:
    with Gate() as gate, rpc.api._wait_all():
        futures = [rpc.rpc_async(1, gate.wait_inside, (i,)) for i in range(3)]
        gate.open()
    assert all(f.done() for f in futures)


def test_wait_all_context_raises(shared: Mesh) -> None:
    with pytest.raises(KeyError, match="k"), rpc._wait_all():
        rpc.rpc_async(1, fail, (KeyError("k"),))


COMPLETIONS: dict[str, Callable[[rpc.Future[Any]], object]] = {
    "set_result": lambda future: future.set_result(1),
    "set_exception": lambda future: future.set_exception(ValueError("1")),
    "cancel": lambda future: future.cancel(),
}


def of_call() -> rpc.Future[Any]:
    return rpc.Future.of_call(entered_call(table(), peer=0, timeout=60), Calling())


@pytest.mark.parametrize("make", [rpc.Future, of_call], ids=["plain", "of a call"])
@pytest.mark.parametrize("complete", COMPLETIONS.values(), ids=COMPLETIONS)
def test_ctrl_c_leaves_no_future_that_nobody_can_complete(complete: Any, make: Any) -> None:
    """Other threads may wait for it."""
    cls = rpc.Future
    functions = [
        *(cls.set_result, cls.set_exception, cls.cancel, cls._complete_by, cls._claim),
        *(cls._claim_for_program, cls._set),
    ]
    for number in itertools.count(1):
        future = make()
        try:
            with ctrl_c_at(number, *functions):
                complete(future)
        except KeyboardInterrupt:
            if not future.done():
                future.set_result(2)  # nobody has claimed it
            assert future.done()
        else:
            break
    assert number > 3
