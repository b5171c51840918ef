"""Chains of callbacks, of any length."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from typing import Any

import pytest

import zrpc as rpc
from tests.support.settled import chain, result_within
from tests.support.waiting import SOON

LONG = 10_000


@pytest.mark.system
def test_a_long_chain_of_a_future_of_ones_own() -> None:
    first: rpc.Future[int] = rpc.Future()
    last = chain(first, LONG)
    first.set_result(0)
    assert last.done()  # as torch's: by the thread that completes the first
    assert last.value() == LONG


def test_an_error_passes_through_a_long_chain() -> None:
    first: rpc.Future[int] = rpc.Future()
    last = chain(first, 200)
    first.set_exception(KeyError("k"))
    assert last.done()
    with pytest.raises(KeyError, match="k"):
        last.value()


def test_callbacks_of_the_next_future_come_before_the_others() -> None:
    """However deep they are, as if each ran inside of what completes its future."""
    for depth in (0, 50):
        first: rpc.Future[int] = rpc.Future()
        last = chain(first, depth)
        order: list[str] = []
        note = order.append
        one = last.then(lambda f, note=note: note("a"))
        one.then(lambda f, note=note: note("a1")).then(lambda f, note=note: note("a11"))
        one.then(lambda f, note=note: note("a2"))
        last.then(lambda f, note=note: note("b"))
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
