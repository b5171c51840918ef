"""The Future of a call: torch's, and more."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import operator
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.pending import entered_call
from tests.support.targets import echo, fail
from tests.support.waiting import SOON
from zrpc.calls import trampoline
from zrpc.calls.caller import wait_until_settled
from zrpc.calls.pending_calls import PendingCall, PendingCalls
from zrpc.testing import Mesh


def test_it_is_a_torch_future(shared: Mesh) -> None:
    future = rpc.rpc_async(1, operator.add, (1, 2))
    assert isinstance(future, torch.futures.Future)
    assert isinstance(future, torch._C.Future)
    assert isinstance(future, rpc.Future)
    assert future.wait() == 3
    assert future.done()
    assert future.value() == 3


class Calling:
    """Stands for the caller of a future's call; its outcome is the value."""

    def __init__(
        self,
        receive: Callable[[threading.Lock, float], None] | None = None,
        complete: Callable[[Callable[[], None]], None] = lambda job: job(),
    ) -> None:
        self.receive = receive
        self.complete = complete

    def wait(self, call: PendingCall) -> None:
        wait_until_settled(call, self.receive)

    def decode(self, outcome: Any) -> Any:
        return outcome


def test_one_in_flight_is_few_objects_for_the_garbage_collector() -> None:
    """The collector goes through all objects whenever many are new."""
    calls, calling = PendingCalls(), Calling()

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


# -- then and add_done_callback ----------------------------------------------------------------


def test_then_chain(shared: Mesh) -> None:
    future = rpc.rpc_async(1, operator.add, (1, 2))
    assert future.then(lambda f: f.wait() * 10).then(lambda f: f.value() + 1).wait() == 31


def test_then_on_a_future_that_is_done(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (1,))
    future.wait()
    assert future.then(lambda f: f.wait() + 1).wait() == 2


def test_the_callback_gets_the_future_itself(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (1,))
    seen: list[Any] = []
    future.then(seen.append).wait()
    assert seen == [future]
    assert isinstance(seen[0], rpc.Future)


def test_then_after_an_error(shared: Mesh) -> None:
    future = rpc.rpc_async(1, fail, (KeyError("k"),))

    def recover(done: Any) -> str:
        try:
            done.wait()
        except KeyError:
            return "recovered"
        return "no error"

    assert future.then(recover).wait() == "recovered"
    with pytest.raises(KeyError, match="k"):
        future.then(lambda f: f.wait()).wait()


def test_an_error_in_then(shared: Mesh) -> None:
    failed = rpc.rpc_async(1, echo, (1,)).then(lambda f: fail(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        failed.wait()
    with pytest.raises(KeyError, match="mine"):
        failed.then(lambda f: f.value()).wait()


@pytest.mark.parametrize("add", ["then", "add_done_callback"])
@pytest.mark.parametrize("callback", [None, 1, "print"])
def test_what_cannot_be_called_is_no_callback(shared: Mesh, add: str, callback: Any) -> None:
    future = rpc.rpc_async(1, echo, (1,))
    with pytest.raises(TypeError, match=rf"{add}\(\): incompatible function arguments\."):
        getattr(future, add)(callback)
    assert future.then(lambda f: f.wait()).wait() == 1


def no_future_expected() -> None: ...


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (
            no_future_expected,
            r"no_future_expected\(\) takes 0 positional arguments but 1 was given",
        ),
        (lambda f: f + 1, r"unsupported operand type\(s\) for \+"),
    ],
)
def test_a_callback_that_takes_no_future_raises_the_errors_of_torch(
    shared: Mesh, callback: Any, text: str
) -> None:
    failed = rpc.rpc_async(1, echo, (1,)).then(callback)
    for kind in (RuntimeError, TypeError):
        with pytest.raises(
            kind, match="Got the following error when running the callback: TypeError: .*" + text
        ):
            failed.wait()


def test_a_type_error_of_the_callee_stays_as_it_is_in_a_callback(shared: Mesh) -> None:
    failed = rpc.rpc_async(1, fail, (TypeError("the callee's"),)).then(lambda f: f.wait())
    with pytest.raises(TypeError, match=r"^the callee's$") as info:
        failed.wait()
    assert info.type is TypeError


def test_callbacks_run_once_each_in_any_number(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, (7,))
        seen: list[int] = []
        done = threading.Semaphore(0)

        def note(f: Any) -> None:
            seen.append(f.wait())
            done.release()

        for _ in range(5):
            future.add_done_callback(note)
        assert seen == []
        gate.open()
        future.wait()
        future.add_done_callback(note)
        for _ in range(6):
            assert done.acquire(timeout=SOON)
        assert seen == [7] * 6


def test_callbacks_run_even_if_nobody_waits(shared: Mesh) -> None:
    ran = threading.Event()
    rpc.rpc_async(1, echo, (1,)).add_done_callback(lambda f: ran.set())
    assert ran.wait(SOON)


def test_an_error_in_a_callback_is_logged_and_harms_nobody(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    ran = threading.Event()
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, (1,))
        future.add_done_callback(lambda f: fail(KeyError("in a callback")))
        future.add_done_callback(lambda f: ran.set())
        gate.open()  # only now, or they would run in two threads
        assert ran.wait(SOON)
    assert future.wait() == 1
    assert "in a callback" in caplog.text


class Outcome(BaseException):
    """As those of pytest, which are not Exceptions either."""


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, Outcome, GeneratorExit])
def test_whatever_is_raised_in_then_fails_the_new_future(shared: Mesh, kind: Any) -> None:
    failed = rpc.rpc_async(1, echo, (1,)).then(lambda f: fail(kind("in then")))
    assert result_within(failed.then(caught), SOON) is kind
    with pytest.raises(kind, match="in then"):
        failed.wait()


def test_a_callback_that_exits_is_logged_and_harms_nobody(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    future: rpc.Future[int] = rpc.Future()
    ran: list[int] = []
    future.add_done_callback(lambda f: fail(SystemExit("in a callback")))
    future.add_done_callback(lambda f: ran.append(f.wait()))
    future.set_result(1)
    assert ran == [1]
    assert "in a callback" in caplog.text


def test_an_exit_in_then_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    future: rpc.Future[int] = rpc.Future()
    future.then(lambda f: fail(SystemExit("in then")))
    future.set_result(1)
    del future
    gc.collect()
    assert "nobody waited" in caplog.text


def test_ctrl_c_in_a_callback_fails_its_future_and_goes_on_in_the_main_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: rpc.Future[int] = rpc.Future()
    interrupted = chain(future, 2).then(lambda f: fail(KeyboardInterrupt("^C")))
    after = interrupted.then(caught)
    future.add_done_callback(lambda f: fail(KeyboardInterrupt("again")))
    beside = future.then(lambda f: f.wait())
    with pytest.raises(KeyboardInterrupt):
        future.set_result(1)
    assert future.value() == beside.value() == 1
    assert after.value() is KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):  # where the future is done already
        future.then(lambda f: fail(KeyboardInterrupt("^C")))
    assert rpc.Future.value(future.then(lambda f: 5)) == 5  # it was raised once
    assert not caplog.text


def test_ctrl_c_between_callbacks_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()

    def interrupt() -> bool:
        if next(looks) == 20:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(trampoline, "_never", interrupt)
    future: rpc.Future[int] = rpc.Future()
    last = chain(future, 100)
    with pytest.raises(KeyboardInterrupt):
        future.set_result(0)
    assert last.value() == 100


def test_ctrl_c_in_a_callback_interrupts_wait() -> None:
    future = settled_in_wait(5)
    ran_in: list[Any] = []

    def interrupt(done: Any) -> None:
        ran_in.append(threading.current_thread())
        raise KeyboardInterrupt

    result = future.then(interrupt)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert ran_in == [threading.main_thread()]
    assert future.wait() == 5
    assert caught(result) is KeyboardInterrupt


def settled_in_wait(outcome: Any) -> rpc.Future[Any]:
    """The future of a call that is settled as soon as a thread waits for it, which completes it."""
    call = entered_call(PendingCalls(), peer=0, timeout=SOON)
    return rpc.Future.of_call(call, Calling(receive=lambda gate, timeout: call.fail(outcome)))


def caught(future: Any) -> Any:
    """The class of a future's error."""
    try:
        future.value()
    except BaseException as error:
        return type(error)
    return None


@pytest.mark.parametrize("depth", [1, 5])
def test_callbacks_that_call_and_wait(shared: Mesh, depth: int) -> None:
    def on(n: int) -> int:
        future = rpc.rpc_async(1, echo, (n,))
        if n == 0:
            return future.wait()
        return future.then(lambda f: f.wait() + on(n - 1)).wait()

    assert on(depth) == sum(range(depth + 1))


@pytest.mark.zrpc(options={"num_worker_threads": 2})
def test_callbacks_that_block_hold_up_neither_calls_nor_answers(caller: Mesh) -> None:
    with Gate() as gate, Gate() as answers:
        futures = [rpc.rpc_async(1, answers.wait_inside) for _ in range(3)]
        blocked = [future.then(lambda f: gate.wait_inside()) for future in futures]
        answers.open()  # only now, or a callback would run, and block, in `then`
        gate.await_entry()
        assert [rpc.rpc_sync(1, echo, (i,)) for i in range(20)] == list(range(20))
        future = rpc.rpc_async(1, echo, ("x",))
        assert future.wait() == "x"
        # Also where nobody waits in wait(): its completion takes another thread's place.
        done = threading.Event()
        rpc.rpc_async(1, echo, (1,)).add_done_callback(lambda f: done.set())
        assert done.wait(SOON)
        gate.open()
        assert [f.wait() for f in blocked] == [None] * 3


def test_a_callback_may_wait_for_its_own_future(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (3,))
    result = future.then(lambda f: future.wait() + torch.futures.wait_all([future])[0])
    assert result.wait() == 6


def test_callbacks_know_the_agent(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (1,))
    names: list[str] = []
    done = threading.Event()

    def note(f: Any) -> None:
        names.append(rpc.get_worker_info().name)
        done.set()

    future.add_done_callback(note)
    assert done.wait(SOON)
    assert names == ["worker0"]


# -- chains of callbacks, of any length ----------------------------------------------------------

LONG = 10_000


def chain(first: Any, length: int) -> Any:
    for _ in range(length):
        first = first.then(lambda f: f.wait() + 1)
    return first


def test_a_long_chain_of_a_future_of_ones_own() -> None:
    first: rpc.Future[int] = rpc.Future()
    last = chain(first, LONG)
    first.set_result(0)
    assert last.done()  # as torch's: by the thread that completes the first
    assert last.value() == LONG


def test_a_long_chain_of_a_call(shared: Mesh) -> None:
    with Gate() as gate:
        last = chain(rpc.rpc_async(1, gate.wait_inside, (0,)), LONG)
        gate.open()
        assert last.wait() == LONG


def test_an_error_passes_through_a_long_chain() -> None:
    first: rpc.Future[int] = rpc.Future()
    last = chain(first, 1000)
    first.set_exception(KeyError("k"))
    assert last.done()
    with pytest.raises(KeyError, match="k"):
        last.value()


def test_a_long_chain_of_callbacks_that_complete_the_next_future() -> None:
    futures: list[rpc.Future[int]] = [rpc.Future() for _ in range(LONG)]
    for future, following in itertools.pairwise(futures):
        future.add_done_callback(lambda f, g=following: g.set_result(f.wait() + 1))
    futures[0].set_result(1)
    assert futures[-1].done()
    assert futures[-1].value() == LONG


@pytest.mark.parametrize("depth", [0, 50])
def test_callbacks_of_the_next_future_come_before_the_others(depth: int) -> None:
    """However deep they are, as if each ran inside of what completes its future."""
    first: rpc.Future[int] = rpc.Future()
    last = chain(first, depth)
    order: list[str] = []
    one = last.then(lambda f: order.append("a"))
    one.then(lambda f: order.append("a1")).then(lambda f: order.append("a11"))
    one.then(lambda f: order.append("a2"))
    last.then(lambda f: order.append("b"))
    first.set_result(0)
    assert order == ["a", "a1", "a11", "a2", "b"]


@pytest.mark.parametrize("ask", [rpc.Future.wait, rpc.Future.value], ids=["wait", "value"])
def test_a_callback_deep_in_a_chain_asks_for_what_it_has_brought_about(ask: Any) -> None:
    first: rpc.Future[int] = rpc.Future()
    inner: rpc.Future[int] = rpc.Future()
    of_inner = chain(inner, 50)

    def bring_about(future: Any) -> int:
        inner.set_result(future.wait())
        # The second one's future is done already: its callback runs at once.
        return of_inner.wait() + ask(future.then(lambda f: f.wait()))

    result = chain(first, 50).then(bring_about)
    threading.Thread(target=first.set_result, args=(0,), daemon=True).start()
    assert result_within(result, SOON) == 150


@pytest.mark.parametrize("depth", range(12))
def test_what_comes_after_what_a_callback_waits_for_is_called_too(depth: int) -> None:
    """Deep in a chain, where both are put off: the callback waits for the first of them only."""
    first: rpc.Future[int] = rpc.Future()
    inner: rpc.Future[int] = rpc.Future()
    awaited, after = inner.then(lambda f: "a"), inner.then(lambda f: "b")

    def bring_about(_: Any) -> str:
        inner.set_result(0)
        return awaited.wait()

    last = chain(first, depth).then(bring_about)
    first.set_result(0)
    assert (last.value(), after.done()) == ("a", True)


def test_a_long_chain_by_way_of_a_future_that_is_done() -> None:
    """Its callbacks run at once, however deep."""
    done: rpc.Future[None] = rpc.Future()
    done.set_result(None)
    futures: list[rpc.Future[int]] = [rpc.Future() for _ in range(1000)]
    for future, following in itertools.pairwise(futures):
        future.add_done_callback(lambda f, g=following: done.then(lambda _: g.set_result(1)))
    futures[0].set_result(1)
    assert all(future.done() for future in futures)


def test_endless_recursion_in_a_callback_fails_its_future_alone() -> None:
    def recurse(future: Any) -> int:
        return recurse(future) + 1

    first: rpc.Future[int] = rpc.Future()
    last, beside = chain(first, 20).then(recurse).then(lambda f: f.wait()), chain(first, 20)
    first.set_result(0)
    assert last.done()
    with pytest.raises(RecursionError):
        last.value()
    assert beside.value() == 20


def test_a_chain_that_a_thread_completes_whose_stack_is_nearly_full() -> None:
    first: rpc.Future[int] = rpc.Future()
    last = chain(first, 30)

    def descend(levels: int) -> None:
        descend(levels - 1) if levels else first.set_result(0)

    thread = threading.Thread(target=descend, args=(sys.getrecursionlimit() - 60,))
    thread.start()
    thread.join(SOON)
    assert last.done()
    assert last.value() == 30


def test_a_chain_leaves_nothing_behind() -> None:
    class Big:
        pass

    value = Big()
    gone = weakref.ref(value)
    first: rpc.Future[Any] = rpc.Future()
    last = first
    for _ in range(50):
        last = last.then(lambda f: f.wait())
    alive = [weakref.ref(future) for future in (first, last)]
    first.set_result(value)
    assert last.value() is value
    del first, last, value
    gc.collect()
    assert gone() is None
    assert [future() for future in alive] == [None] * 2


def result_within(future: Any, seconds: float) -> Any:
    """The future's value, waited for in a way that a future that stays open can't hold up."""
    done = threading.Event()
    future.add_done_callback(lambda f: done.set())
    assert done.wait(seconds)
    return future.value()


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
    call = entered_call(PendingCalls(), peer=0, timeout=SOON)
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


# -- await -----------------------------------------------------------------------------------


def test_await(shared: Mesh) -> None:
    async def main() -> Any:
        future = rpc.rpc_async(1, operator.add, (1, 2))
        return await future, await future

    assert asyncio.run(main()) == (3, 3)


def test_await_raises(shared: Mesh) -> None:
    async def main() -> None:
        with pytest.raises(KeyError, match="k"):
            await rpc.rpc_async(1, fail, (KeyError("k"),))

    asyncio.run(main())


def test_await_does_not_block_the_loop(shared: Mesh) -> None:
    async def main() -> list[str]:
        with Gate() as gate:
            order: list[str] = []

            async def waits() -> None:
                order.append(await rpc.rpc_async(1, gate.wait_inside, ("answer",)))

            task = asyncio.ensure_future(waits())
            await asyncio.sleep(0)
            order.append("the loop runs")
            gate.open()
            await asyncio.wait_for(task, SOON)
            return order

    assert asyncio.run(main()) == ["the loop runs", "answer"]


def test_gather(shared: Mesh) -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*[rpc.rpc_async(i % 2, echo, (i,)) for i in range(50)])

    assert asyncio.run(main()) == list(range(50))


def test_wait_for_times_out(shared: Mesh) -> None:
    async def main(gate: Gate) -> Any:
        future = rpc.rpc_async(1, gate.wait_inside, (5,))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), 0.01)
        gate.open()
        return await future  # it goes on, and can be awaited again

    with Gate() as gate:
        assert asyncio.run(main(gate)) == 5


def test_await_of_several_loops_at_once(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, (5,))
        results: list[int] = []

        async def main() -> int:
            return await future

        threads = [
            threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        gate.open()
        for thread in threads:
            thread.join(SOON)
        assert results == [5] * 4


def test_a_loop_that_was_closed_meanwhile(shared: Mesh) -> None:
    with Gate() as gate:
        future = rpc.rpc_async(1, gate.wait_inside, (5,))

        async def main() -> Any:
            waiting = future.__await__()
            next(waiting)
            return waiting

        waiting = asyncio.run(main())
        gate.open()
        assert future.wait() == 5
        waiting.close()


def test_await_of_a_future_of_ones_own(shared: Mesh) -> None:
    async def main() -> int:
        future: rpc.Future[int] = rpc.Future()
        threading.Thread(target=future.set_result, args=(5,)).start()
        return await future + await future.then(lambda f: f.wait() + 1)

    assert asyncio.run(main()) == 11


# -- _wait_all -------------------------------------------------------------------------------


def test_wait_all_context(shared: Mesh) -> None:
    with Gate() as gate, rpc.api._wait_all():
        futures = [rpc.rpc_async(1, gate.wait_inside, (i,)) for i in range(3)]
        gate.open()
    assert all(f.done() for f in futures)


def test_wait_all_context_raises(shared: Mesh) -> None:
    with pytest.raises(KeyError, match="k"), rpc._wait_all():
        rpc.rpc_async(1, fail, (KeyError("k"),))
