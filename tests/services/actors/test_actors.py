"""Actors as programs see them: how their calls run, in which order, and how they end."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch

import zrpc
from tests.support.gates import Gate
from tests.support.identity import Same
from tests.support.targets import Unreadable
from tests.support.waiting import until
from zrpc.testing import Mesh

pytestmark = [
    pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20}),
    pytest.mark.usefixtures("caller"),
]


class Later(Same):
    """A future that the test completes."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()


def waits(future: Any, to: int = 1) -> bool:
    """Returns whether a call waits, though a later one of another object was answered."""
    zrpc.rpc_sync(to, max, args=(1, 2))
    return not future.done()


@zrpc.actor
class Log:
    """Notes the calls that have begun, and how many of them ever ran at the same time."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.running = self.most = 0
        self._lock = threading.Lock()

    def _enter(self, name: Any, by: int) -> None:
        with self._lock:
            self.running += by
            self.most = max(self.most, self.running)
            if by > 0:
                self.calls.append(name)

    def note(self, name: Any, *_: Any) -> Any:
        self._enter(name, 1)
        self._enter(name, -1)
        return name

    def wait(self, gate: Gate, name: Any = "wait") -> Any:
        self._enter(name, 1)
        try:
            return gate.wait_inside(name)
        finally:
            self._enter(name, -1)

    async def sleep(self, name: Any, seconds: float = 0.001) -> Any:
        self._enter(name, 1)
        try:
            await asyncio.sleep(seconds)
            return name
        finally:
            self._enter(name, -1)

    def thread(self) -> int:
        return threading.get_ident()

    def unpicklable(self) -> Any:
        self.calls.append("unpicklable")
        return threading.Lock()

    def fail(self, text: str) -> None:
        self.calls.append("fail")
        raise KeyError(text)

    @zrpc.functions.async_execution
    def later(self, later: Later) -> Any:
        self.calls.append("later")
        return later.future

    @zrpc.concurrent
    def beside(self) -> list[Any]:
        return list(self.calls)

    @zrpc.concurrent(2)
    def beside_at_most_two(self, gate: Gate) -> Any:
        return gate.wait_inside()

    def seen(self) -> tuple[list[Any], int]:
        return self.calls, self.most

    @property
    def noting(self) -> Any:
        self.note("property")
        return self.note


class Parallel(Log):
    """Inherits the mark; in tests it is made with another one."""


def busy(gate: Gate) -> tuple[Any, Any]:
    """Returns an actor and its call that runs until the gate is opened."""
    log = zrpc.remote(1, Log)
    running = log.rpc_async().wait(gate)
    gate.await_entry()
    return log, running


def refused(match: str, call: Any) -> None:
    """Makes a call, which fails before it begins."""
    with pytest.raises(zrpc.RpcError, match=match) as caught:
        call()
    assert caught.value.executed is False


# -- classes -----------------------------------------------------------------------------------


def test_called_locally_a_decorated_class_is_an_ordinary_class() -> None:
    log = Log()
    assert type(log) is Log
    assert log.note(1) == 1
    assert log.beside() == [1]
    assert isinstance(zrpc.actor(Parallel, concurrency=2)(), Parallel)


def test_what_can_t_be_an_actor_or_concurrent_is_refused() -> None:
    for concurrency in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="how many calls an actor runs at once"):
            zrpc.actor(concurrency=concurrency)
    with pytest.raises(TypeError, match="expected a class"):
        zrpc.actor(max)
    for method in (None, 2.5, True, property(len)):
        with pytest.raises(TypeError, match="expected a method to run beside the others"):
            zrpc.concurrent(method)
    with pytest.raises(ValueError, match="how many calls of a method"):
        zrpc.concurrent(0)


# -- one at a time, or more --------------------------------------------------------------------


def test_calls_run_one_at_a_time_in_threads_and_across_awaits() -> None:
    log = zrpc.remote(1, Log)
    futures = [getattr(log.rpc_async(), ("note", "sleep")[n % 2])(n) for n in range(100)]
    assert zrpc.wait_all(futures) == list(range(100))
    assert log.rpc_sync().seen() == (list(range(100)), 1)


class Unmarked:
    """Makes RRefs to itself, also before anybody knows that it is an actor."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.own = zrpc.RRef(self), zrpc.RRef(self)

    def me(self) -> Unmarked:
        return self

    def handles(self) -> Any:
        return *self.own, zrpc.RRef(self)

    async def work(self) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return self.most


@zrpc.actor
class SelfMade(Unmarked):
    pass


@pytest.mark.parametrize("cls", [Unmarked, SelfMade])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_rrefs_that_an_actor_makes_to_itself_are_the_same_actor(cls: Any, concurrency: int) -> None:
    actor = zrpc.remote(1, zrpc.actor(cls, concurrency=concurrency), name="self")
    rrefs = [actor, actor.remote().me(), *actor.rpc_sync().handles()]
    zrpc.wait_all([rref.rpc_async().work() for rref in rrefs * 3])
    assert actor.rpc_sync().work() == concurrency
    rrefs[1].stop()
    with pytest.raises(zrpc.RpcTimeoutError):
        zrpc.get_actor("self", timeout=0.01)
    for rref in rrefs:
        refused(f"the actor {cls.__name__} 'self' on worker1 was stopped", rref.rpc_sync().work)


def test_as_many_calls_run_at_once_as_the_actor_says(gate: Gate) -> None:
    log = zrpc.remote(1, zrpc.actor(Parallel, concurrency=3))
    zrpc.wait_all([log.rpc_async().sleep(n, 0.02) for n in range(12)])
    assert log.rpc_sync().seen()[1] == 3
    futures = [log.rpc_async().wait(gate, n) for n in range(12, 24)]
    gate.await_entry(3)
    gate.open()
    zrpc.wait_all(futures)
    calls, most = log.rpc_sync().seen()
    assert (sorted(calls), most) == (list(range(24)), 3)


def test_coroutines_begin_in_order_also_if_several_run_at_once() -> None:
    log = zrpc.remote(1, zrpc.actor(Parallel, concurrency=8))
    zrpc.wait_all([log.rpc_async().sleep(n) for n in range(200)])
    assert log.rpc_sync().seen()[0] == list(range(200))


def test_a_method_with_a_future_holds_the_actor_until_it_is_done() -> None:
    log, later = zrpc.remote(1, Log), Later()
    futures = [log.rpc_async().later(later), log.rpc_async().note(1)]
    until(lambda: log.rpc_sync().beside() == ["later"])
    assert waits(futures[1])
    later.future.set_result("done")
    assert zrpc.wait_all(futures) == ["done", 1]


@pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20, "num_worker_threads": 1})
def test_calls_that_wait_take_no_threads() -> None:
    log = zrpc.remote(1, Log)
    running = log.rpc_async().sleep("long", 60)  # a coroutine, which takes no thread either
    waiting = [log.rpc_async().note(n) for n in range(50)]
    assert zrpc.rpc_sync(1, max, args=(1, 2)) == 2
    running.cancel()
    assert zrpc.wait_all(waiting) == list(range(50))


def test_a_thread_that_ends_a_call_begins_the_next_one(gate: Gate) -> None:
    log, first = busy(gate)
    others = [log.rpc_async().thread() for _ in range(60)]
    assert waits(first)
    gate.open()
    threads = zrpc.wait_all(others)
    changes = sum(one != other for one, other in pairwise(threads))
    assert changes < 10, threads  # a thread that gets no processor time may be replaced


# -- order -------------------------------------------------------------------------------------


def test_calls_begin_in_the_order_in_which_they_were_made_though_small_messages_overtake() -> None:
    log = zrpc.remote(1, Log)
    sizes = [10, 1 << 20, 10, 300_000]
    futures = [log.rpc_async().note(n, torch.ones(sizes[n % 4])) for n in range(80)]
    assert zrpc.wait_all(futures) == list(range(80))
    assert log.rpc_sync().seen()[0] == list(range(80))


def test_calls_of_all_kinds_are_in_one_order() -> None:
    log = zrpc.remote(1, Log)
    for n in range(0, 40, 4):
        log.rpc_async().note(n)
        made = log.remote().note(n + 1)
        assert log.rpc_sync().note(n + 2) == n + 2
        log.rpc_async().sleep(n + 3)
        assert made.to_here() == n + 1
    assert log.rpc_sync().seen()[0] == list(range(40))


def test_calls_made_before_the_actor_is_are_in_order_too(gate: Gate) -> None:
    log = zrpc.remote(1, Slow, args=(gate,))
    futures = [log.rpc_async().note(n, torch.ones(10 + 300_000 * (n % 2))) for n in range(20)]
    gate.open()
    zrpc.wait_all(futures)
    assert log.rpc_sync().seen() == (list(range(20)), 1)


def use(log: Any, begin: int) -> None:
    zrpc.wait_all([log.rpc_async().note(n, torch.ones(10)) for n in range(begin, begin + 20)])


def test_each_worker_that_gets_the_rref_has_an_order_of_its_own() -> None:
    log = zrpc.remote(1, Log)
    # An RRef arrives again and again, and is dropped in between.
    for begin in range(0, 60, 20):
        zrpc.wait_all([zrpc.rpc_async(to, use, args=(log, 100 * to + begin)) for to in (0, 1)])
    calls, most = log.rpc_sync().seen()
    for to in (0, 1):
        own = [n for n in calls if n // 100 == to]
        assert own == list(range(100 * to, 100 * to + 60))
    assert most == 1


def test_marked_methods_begin_beside_the_others_before_calls_that_wait(gate: Gate) -> None:
    log, running = busy(gate)
    futures = [running, log.rpc_async().note(1)]
    assert log.rpc_sync().beside() == ["wait"]
    limited = [log.rpc_async().beside_at_most_two(gate) for _ in range(3)]
    gate.await_entry(2)
    assert not gate.entered.acquire(timeout=0.05)
    gate.open()
    zrpc.wait_all(futures + limited)


def test_local_value_passes_the_others_by_and_to_here_waits(gate: Gate) -> None:
    log = zrpc.RRef(Log())
    future = log.rpc_async().wait(gate)
    gate.await_entry()
    assert log.local_value().running == 1
    with pytest.raises(zrpc.RpcTimeoutError):
        log.to_here(timeout=0.05)
    gate.open()
    assert log.to_here() is log.local_value()
    assert log.local_value().running == 0
    future.wait()


def test_a_property_is_read_in_the_turn_of_the_call_that_needs_it(gate: Gate) -> None:
    log, running = busy(gate)
    made = log.remote().noting("made")  # asks first whether there is such a method
    gate.open()
    assert (running.wait(), made.to_here()) == ("wait", "made")
    assert log.rpc_sync().seen() == (["wait", "property", "made"], 1)


# -- the ends of calls -------------------------------------------------------------------------


def test_a_call_that_is_cancelled_or_times_out_while_it_waits_never_runs(gate: Gate) -> None:
    log, first = busy(gate)
    waiting = [log.rpc_async().note(n) for n in range(10)]
    with pytest.raises(zrpc.RpcTimeoutError, match=r"Log\.note on worker1") as caught:
        log.rpc_sync(timeout=0.05).note("late")
    assert caught.value.executed is None
    for future in waiting[::2]:
        assert future.cancel()
    assert waits(first)  # what comes after that finds the calls gone
    gate.open()
    assert zrpc.wait_all([first, *waiting[1::2]]) == ["wait", 1, 3, 5, 7, 9]
    assert log.rpc_sync().seen()[0] == ["wait", 1, 3, 5, 7, 9]


def test_a_call_that_can_t_be_pickled_read_or_found_leaves_no_gap() -> None:
    log = zrpc.remote(1, Log)
    with pytest.raises(zrpc.SerializationError):
        log.rpc_sync().note(threading.Lock())
    with pytest.raises(zrpc.SerializationError):
        log.rpc_async().note(threading.Lock())
    with pytest.raises(zrpc.SerializationError):
        log.rpc_sync().unpicklable()
    with pytest.raises(KeyError, match="why"):
        log.rpc_sync().fail("why")
    with pytest.raises(AttributeError):
        log.rpc_sync().missing()
    with pytest.raises(AttributeError):
        log.remote().missing()
    refused("no number", lambda: log.rpc_sync().note(Unreadable()))
    assert log.rpc_sync().note(1) == 1
    assert log.rpc_sync().seen()[0] == ["unpicklable", "fail", 1]


def test_a_coroutine_and_a_future_hold_the_actor_only_while_their_caller_waits() -> None:
    log = zrpc.remote(1, Log)
    for call in (lambda: log.rpc_async().sleep("long", 60), lambda: log.rpc_async().later(Later())):
        before = len(log.rpc_sync().beside())
        running = call()
        until(lambda before=before: len(log.rpc_sync().beside()) > before)
        assert running.cancel()
        assert log.rpc_sync().note(1) == 1


def test_a_running_method_goes_on_after_its_caller_and_holds_the_actor(gate: Gate) -> None:
    log, running = busy(gate)
    running.cancel()
    following = log.rpc_async().note(1)
    assert waits(following)
    gate.open()
    assert following.wait() == 1


def call_twice(log: Any, gate: Gate) -> None:
    log.rpc_async().wait(gate, "of the lost")
    log.rpc_async().note("waits")


@pytest.mark.zrpc(workers=3, options={"rpc_timeout": 20})
def test_the_waiting_calls_of_a_worker_that_is_lost_never_run(caller: Mesh, gate: Gate) -> None:
    log = zrpc.remote(1, Log)
    zrpc.rpc_sync(2, call_twice, args=(log, gate))
    gate.await_entry()
    until(lambda: len(caller.agent(1).callee.requests) >= 2)
    caller.agent(2).close()
    until(lambda: 2 in caller.agent(1).membership.lost)
    following = log.rpc_async().note("ours")
    gate.open()
    assert following.wait() == "ours"
    assert log.rpc_sync().seen()[0] == ["of the lost", "ours"]


# -- bytes -------------------------------------------------------------------------------------

SMALL = {"rpc_timeout": 20, "max_bytes_in_flight": 1 << 20}


@pytest.mark.zrpc(workers=2, options=SMALL)
def test_what_waits_is_bounded_and_never_holds_up_calls_to_others(gate: Gate) -> None:
    log, running = busy(gate)
    waiting = [log.rpc_async().note(n, b"." * 300_000) for n in range(3)]
    full = r"the mailbox of the actor Log on worker1 is full"
    refused(full, lambda: log.rpc_sync().note("too much", b"." * 300_000))
    refused(full, lambda: log.rpc_async().note("too much", b"." * 300_000).wait())
    assert zrpc.rpc_sync(1, len, args=(b"." * 900_000,)) == 900_000
    gate.open()
    assert zrpc.wait_all([running, *waiting]) == ["wait", 0, 1, 2]
    assert log.rpc_sync().note(3, b"." * 2_000_000) == 3  # larger than the bound, but alone
    assert log.rpc_sync().seen()[0] == ["wait", 0, 1, 2, 3]


def fill(log: Any) -> str:
    futures = [log.rpc_async().note(n, b"." * 300_000) for n in range(3)]
    try:
        zrpc.wait_all(futures)
    except zrpc.RpcError as error:
        return f"{error} {error.executed}"
    return ""


@pytest.mark.zrpc(workers=3, options=SMALL)
def test_what_waits_of_all_callers_together_is_bounded(gate: Gate) -> None:
    log, running = busy(gate)
    callers = [zrpc.rpc_async(to, fill, args=(log,)) for to in (0, 2)]
    until(lambda: any(future.done() for future in callers))
    gate.open()
    texts = filter(None, zrpc.wait_all(callers))
    assert all("mailbox of the actor Log on worker1" in text and "False" in text for text in texts)
    running.wait()


class Slow(Log):
    def __init__(self, gate: Gate) -> None:
        gate.wait_inside()
        super().__init__()
