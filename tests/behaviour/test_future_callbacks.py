"""The callbacks of a future, then and add_done_callback, and chains of them of any length."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import itertools
import sys
import threading
import weakref
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.recursion import call_with_frames_left
from tests.support.settled import caught, chain, result_within
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.targets import echo, fail
from tests.support.threads import start_all
from tests.support.waiting import SOON
from tests.support.ways import by_async
from zrpc.testing import Mesh


def test_a_callback_gets_the_future_and_knows_the_agent(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (3,))
    seen: list[Any] = []
    future.then(seen.append).wait()
    future.add_done_callback(lambda _: seen.append(rpc.get_worker_info().name))
    assert seen == [future, "worker0"]
    twice = future.then(lambda f: future.wait() + torch.futures.wait_all([f])[0])
    assert twice.wait() == 6
    failed = rpc.rpc_async(1, fail, (KeyError("k"),))
    assert failed.then(caught).wait() is KeyError
    with pytest.raises(KeyError, match="k"):
        failed.then(lambda f: f.wait()).wait()


def test_what_cannot_be_called_is_no_callback(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (1,))
    for add in (future.then, future.add_done_callback):
        for callback in (None, 1, "print"):
            text = rf"{add.__name__}\(\): incompatible function arguments\."
            with pytest.raises(TypeError, match=text):
                add(callback)  # type: ignore[arg-type]


def test_a_type_error_is_that_of_torch_unless_it_is_the_callees(shared: Mesh) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: None, r"<lambda>\(\) takes 0 positional arguments but 1 was given"),
        (lambda f: f + 1, r"unsupported operand type\(s\) for \+"),
    ]
    for callback, text in cases:
        failed = rpc.rpc_async(1, echo, (1,)).then(callback)
        text = "Got the following error when running the callback: TypeError: .*" + text
        for kind in (RuntimeError, TypeError):
            with pytest.raises(kind, match=text):
                failed.wait()
    failed = rpc.rpc_async(1, fail, (TypeError("the callee's"),)).then(lambda f: f.wait())
    with pytest.raises(TypeError, match=r"^the callee's$") as info:
        failed.wait()
    assert info.type is TypeError


def test_an_error_in_a_callback_is_logged(
    shared: Mesh, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    future, ran = rpc.rpc_async(1, gate.wait_inside, (1,)), threading.Event()
    future.add_done_callback(lambda f: fail(KeyError("in a callback")))
    future.add_done_callback(lambda f: fail(SystemExit("in another callback")))
    future.add_done_callback(lambda f: ran.set())
    gate.open()  # only now, or they would run in two threads
    assert ran.wait(SOON)
    assert future.wait() == 1
    assert "in a callback" in caplog.text
    assert "in another callback" in caplog.text


class Outcome(BaseException):
    """As those of pytest, which are not Exceptions either."""


def test_whatever_is_raised_in_then_fails_the_new_future(shared: Mesh) -> None:
    for kind in (KeyError, SystemExit, asyncio.CancelledError, Outcome, GeneratorExit):
        error = kind("in then")
        failed = rpc.rpc_async(1, echo, (1,)).then(lambda f, error=error: fail(error))
        assert result_within(failed.then(caught), SOON) is kind
        for ask in (failed.wait, failed.then(lambda f: f.value()).wait):
            with pytest.raises(kind, match="in then"):
                ask()


def test_ctrl_c_in_a_callback_fails_its_future_too(caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.system
def test_ctrl_c_between_callbacks_loses_none() -> None:
    def run(number: int) -> None:
        future: rpc.Future[int] = rpc.Future()
        last = chain(future, 15)
        with at_step(number, interrupt), contextlib.suppress(KeyboardInterrupt):
            future.set_result(0)
        if not future.done():  # it was interrupted before that
            future.set_result(0)
        assert caught(last) in (None, KeyboardInterrupt)

    run(0)  # takes more steps than later ones
    for number in some_steps(lambda: run(0)):
        run(number)


def test_callbacks_run_in_their_order_also_those_of_torchs_collections() -> None:
    future, order = rpc.Future[int](), list[str]()
    future.then(lambda _: order.append("first"))
    torch.futures.collect_all([future]).then(lambda _: order.append("of torch"))
    future.add_done_callback(lambda _: order.append("last"))
    future.set_result(1)
    assert order == ["first", "of torch", "last"]


@pytest.mark.system
@pytest.mark.zrpc(options={"num_worker_threads": 2})
def test_callbacks_that_block_hold_up_neither_calls_nor_answers(caller: Mesh, gate: Gate) -> None:
    with Gate() as answers:
        futures = [rpc.rpc_async(1, answers.wait_inside) for _ in range(3)]
        blocked = [future.then(lambda f: gate.wait_inside()) for future in futures]
        answers.open()  # only now, or a callback would run, and block, in `then`
        gate.await_entry()
        assert [rpc.rpc_sync(1, echo, (i,)) for i in range(20)] == list(range(20))
        assert by_async(1, echo, ("x",)) == "x"
        # Also where nobody waits in wait(): its completion takes another thread's place.
        assert result_within(rpc.rpc_async(1, echo, (1,)), SOON) == 1
        gate.open()
        assert [f.wait() for f in blocked] == [None] * 3


@pytest.mark.parametrize("done", [False, True])
def test_a_callback_near_the_recursion_limit_is_not_lost(done: bool) -> None:
    """Torch would lose it, or end the process."""
    for left in range(2, 240, 2):
        future: rpc.Future[int] = rpc.Future()
        add, complete = partial(future.then, lambda f: f.value() + 1), partial(future.set_result, 1)
        acts = (complete, add) if done else (add, complete)
        results = [acts[0]()]
        call_with_frames_left(left, lambda act=acts[1], results=results: results.append(act()))
        if future.done() and (added := results[1:] if done else results[:1]):
            assert result_within(added[0], SOON) == 2


def test_the_value_of_a_call_is_not_lost_if_a_wait_finds_no_room_for_it(shared: Mesh) -> None:
    def wait(left: int) -> int:
        future = rpc.rpc_async(1, echo, (1,))
        following = future.then(lambda f: f.value() + 1)
        call_with_frames_left(left, future.wait)
        return following.wait()

    context = contextvars.copy_context()
    calls = [partial(context.copy().run, wait, left) for left in range(2, 30)]
    assert start_all(calls, SOON)() == [2] * 28


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_a_callback_for_which_there_was_no_memory_is_called_again(error: type[Exception]) -> None:
    """Not one that has begun: what it did is not undone."""
    called: list[str] = []

    def first(_: object) -> None:
        called.append("first")

    def begun(_: object) -> None:
        called.append("begun")
        raise error

    def refuse(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is first.__code__:
            raise error  # which ends the profile

    future: rpc.Future[int] = rpc.Future()
    for callback in (first, begun):
        future.add_done_callback(callback)
    sys.setprofile(refuse)
    try:
        future.set_result(1)
    finally:
        sys.setprofile(None)
    assert called == ["first", "begun"]


# -- chains ----------------------------------------------------------------------------------

LONG = 10_000


@pytest.mark.system
def test_the_thread_that_completes_a_future_runs_a_chain_of_any_length() -> None:
    """Also one whose stack is nearly full."""

    class Big:
        def __add__(self, _: int) -> Any:
            return self

    first: rpc.Future[Any] = rpc.Future()
    last, value = chain(first, LONG), Big()
    alive = [weakref.ref(each) for each in (first, last, value)]
    first.set_result(value)
    assert last.done()
    assert last.value() is value
    failing: rpc.Future[Any] = rpc.Future()
    failed = chain(failing, 200)
    failing.set_exception(KeyError("k"))
    assert caught(failed) is KeyError
    del first, last, value
    gc.collect()
    assert [each() for each in alive] == [None] * 3
    full: rpc.Future[int] = rpc.Future()
    last = chain(full, 30)
    assert call_with_frames_left(60, lambda: full.set_result(0))
    assert last.done()


def test_callbacks_of_the_next_future_come_before_the_others() -> None:
    """However deep they are, as if each ran inside of what completes its future."""
    for depth in (0, 50):
        first, order = rpc.Future[int](), list[str]()
        last = chain(first, depth)

        def note(future: Any, text: str, order: list[str] = order) -> Any:
            return future.then(lambda _: order.append(text))

        one = note(last, "a")
        note(note(one, "a1"), "a11")
        note(one, "a2")
        note(last, "b")
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


@pytest.mark.parametrize("depth", [0, 5, 11])
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
