"""How long calls wait."""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.settled import result_within
from tests.support.targets import echo
from tests.support.waiting import SOON
from tests.support.ways import by_async, by_wait_all
from zrpc.testing import Mesh

Call = Callable[..., Any]
MESSAGE = r"RPC ran for more than set timeout \(20 ms\) and will now be marked with an error"


def by_value(*args: Any, **kwargs: Any) -> Any:
    return result_within(rpc.rpc_async(*args, **kwargs), SOON)


WAYS: list[Call] = [rpc.rpc_sync, by_async, by_wait_all, by_value]


def test_a_call_that_takes_longer(shared: Mesh, gate: Gate) -> None:
    for call, to in itertools.product(WAYS, (0, 1)):
        with pytest.raises(RuntimeError, match=MESSAGE) as info:
            call(to, gate.wait_inside, timeout=0.02)
        assert isinstance(info.value, rpc.RpcTimeoutError)
        assert isinstance(info.value, TimeoutError)
        assert rpc.rpc_sync(to, echo, (1,)) == 1


def test_it_is_not_over_before_its_time(shared: Mesh, gate: Gate) -> None:
    for _ in range(20):  # after which this thread receives its answers itself
        rpc.rpc_sync(1, echo, (1,))
    begin = time.monotonic()
    with pytest.raises(rpc.RpcTimeoutError):
        rpc.rpc_sync(1, gate.wait_inside, timeout=0.1)
    assert time.monotonic() - begin >= 0.1


@contextlib.contextmanager
def opened_late() -> Iterator[Gate]:
    """A gate that opens after the time-out of MESSAGE."""
    with Gate() as gate:
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        yield gate
        opener.join()


@pytest.mark.system
@pytest.mark.zrpc(options={"rpc_timeout": 0.02})
def test_a_timeout_of_the_call_goes_before_the_default(caller: Mesh, gate: Gate) -> None:
    assert rpc.UNSET_RPC_TIMEOUT == -1
    assert rpc.get_rpc_timeout() == pytest.approx(0.02)
    for call in WAYS:
        for default in ({}, {"timeout": rpc.UNSET_RPC_TIMEOUT}):
            with pytest.raises(RuntimeError, match=MESSAGE):
                call(1, gate.wait_inside, **default)
        for timeout in (0, 20.0, 20):
            with opened_late() as late:
                assert call(1, late.wait_inside, ("in time",), timeout=timeout) == "in time"
    rpc.set_rpc_timeout(0)
    with opened_late() as late:
        assert rpc.rpc_sync(1, late.wait_inside, ("no timeout",)) == "no timeout"
    rpc.set_rpc_timeout(timedelta(minutes=1.5))
    assert rpc.get_rpc_timeout() == 90.0
    # Each worker has its own.
    assert rpc.rpc_sync(1, rpc.get_rpc_timeout, timeout=SOON) == pytest.approx(0.02)


def test_what_is_no_timeout(shared: Mesh) -> None:
    rref = rpc.remote(0, max, (1, 2))
    text = "timeout must be a number of seconds, 0 for no limit, but got "
    calls: list[Callable[..., Any]] = [
        *(partial(way, 1, echo, (1,)) for way in (rpc.rpc_sync, rpc.rpc_async, rpc.remote)),
        *(rref.to_here, rpc.set_rpc_timeout, rpc.shutdown),
    ]
    for call, timeout in itertools.product(calls, (None, "3", [1])):
        with pytest.raises(TypeError, match=f"(?i){re.escape(f'{text}{timeout!r}')}"):
            call(timeout=timeout)
    for function in (rpc.set_rpc_timeout, rpc.shutdown):
        for negative in (-0.5, -1, timedelta(seconds=-1)):
            with pytest.raises(ValueError, match="timeout"):
                function(timeout=negative)  # type: ignore[operator]
    for timeout in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            rpc.rpc_sync(1, echo, (1,), timeout=timeout)
    assert rpc.rpc_sync(1, echo, (1,)) == 1


class Noting:
    """Notes that it is called."""

    called = False

    def note(self) -> None:
        self.called = True

    def items(self) -> Iterator[None]:
        self.called = True
        yield

    def was_called(self) -> bool:
        return self.called


def later_error(call: Callable[[], Any]) -> rpc.RpcError:
    """Returns the error of a call of workers or objects; of a group's, that of each member."""
    with pytest.raises((rpc.RpcTimeoutError, rpc.GroupError)) as info:
        call()
    if not isinstance(info.value, rpc.GroupError):
        return info.value
    errors: list[Any] = [*info.value.errors.values()]
    assert len(errors) == 2
    assert all(isinstance(error, rpc.RpcTimeoutError) for error in errors)
    return errors[0]


@pytest.mark.parametrize("timeout", [-0.5, -7, float("-inf"), timedelta(seconds=-1)])
def test_a_negative_timeout_is_a_deadline_that_has_passed(shared: Mesh, timeout: Any) -> None:
    noting = Noting()  # in a mesh of threads, a function by value would be the same object
    made = [rpc.remote(to, Noting) for to in (0, 1)]
    objects, workers = rpc.group(made), rpc.group(["worker0", "worker1"])
    asked = rpc.remote(1, noting.note, timeout=timeout)
    future = rpc.rpc_async(1, noting.note, timeout=timeout)
    calls: list[Callable[[], Any]] = [
        future.wait,
        asked.to_here,
        asked.rpc_sync().anything,
        lambda: rpc.rpc_sync(1, noting.note, timeout=timeout),
        lambda: list(rpc.rpc_stream(1, noting.items, timeout=timeout)),
        lambda: rpc.rpc_sync(workers, noting.note, timeout=timeout),
        lambda: rpc.rpc_sync(workers, echo, (rpc.share(range(2)),), timeout=timeout),
        lambda: list(rpc.rpc_stream(workers, noting.items, timeout=timeout)),
        lambda: rpc.get_actor("nobody", timeout=timeout),
        lambda: rpc.remote(1, Noting, timeout=timeout, name="late"),
        lambda: objects.rpc_sync(timeout=timeout).note(),
        lambda: objects.ready(timeout=timeout),
        lambda: objects.stop(timeout=timeout),
    ]
    for rref in made:
        calls += [
            *(partial(each, timeout=timeout) for each in (rref.to_here, rref.ready, rref.stop)),
            lambda rref=rref: rref.rpc_sync(timeout=timeout).note(),
            lambda rref=rref: rref.rpc_async(timeout=timeout).note().wait(),
            lambda rref=rref: rref.rpc_stream(timeout=timeout).items(),
            lambda rref=rref: rref.remote(timeout=timeout).note(),
        ]
    for call in calls:
        error = later_error(call)
        assert error.executed is False, call
        assert "only -1 stands for the default" in str(error).lower(), call
    assert rpc.rpc_sync(1, echo, (1,), timeout=rpc.UNSET_RPC_TIMEOUT) == 1
    assert objects.rpc_sync(timeout=-1).was_called() == [False, False]
    assert not noting.called


def doubles(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@pytest.mark.system
def test_a_timeout_may_be_a_timedelta(caller: Mesh, gate: Gate) -> None:
    soon = timedelta(milliseconds=20)
    rref = rpc.remote(1, echo, (gate,))
    assert rref.to_here(timedelta(seconds=20)) is gate
    for call in (
        lambda: rpc.rpc_sync(1, gate.wait_inside, timeout=soon),
        rpc.rpc_async(1, gate.wait_inside, timeout=soon).wait,
        lambda: rpc.remote(1, gate.wait_inside).to_here(soon),
        rref.rpc_sync(timeout=soon).wait_inside,
        rref.rpc_async(timeout=soon).wait_inside().wait,
        lambda: rpc.wait_all([rpc.rpc_async(1, gate.wait_inside)], timeout=soon),
        lambda: rpc.all_gather(1, timeout=soon),
        lambda: list(rpc.rpc_stream(1, gate.wait_inside, deadline=soon)),
        lambda: rpc.get_actor("nobody", timeout=soon),
        lambda: rpc.group("worker*", size=9, timeout=soon),
    ):
        with pytest.raises(rpc.RpcTimeoutError):
            call()
    for args in ((), (rpc.share(range(2)),)):
        with pytest.raises(rpc.GroupError):
            rpc.rpc_sync(rpc.group([1]), gate.wait_inside, args, timeout=soon)
    with pytest.raises(queue.Empty):
        rpc.remote(1, rpc.Queue).rpc_sync().get(timeout=soon)
    assert not rpc.rpc_sync(1, lambda: rpc.current_call().wait_cancelled(soon))
    assert rpc.rpc_sync(1, rpc.batched(doubles, max_wait=soon), (2,)) == 4
    gate.open()


# -- a nested call never outlives its caller ---------------------------------------------------

_nested: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()


def nested(gate: Gate, timeout: float) -> None:
    """A call back that would wait longer than its caller does; answers when the gate opens."""
    try:
        rpc.rpc_sync(0, gate.wait_inside, timeout=timeout)
        _nested.put(None)
    except Exception as error:
        _nested.put(error)
    gate.opened.wait(SOON)


def test_a_nested_call_ends_with_its_caller(shared: Mesh, gate: Gate) -> None:
    """Its own deadline has passed, or the caller's message, that it no longer waits, was sooner."""
    for timeout in (-1, 0, 15):
        for limit in (0.05, 0.5, 5.0):  # on a busy machine the handler may not begin in time
            with pytest.raises(rpc.RpcTimeoutError):
                rpc.rpc_sync(1, nested, (gate, timeout), timeout=limit)
            with contextlib.suppress(queue.Empty):
                error = _nested.get(timeout=2)  # well before its own timeout
                break
        assert isinstance(error, (rpc.RpcTimeoutError, rpc.RpcCancelledError))


@pytest.mark.system
def test_a_nested_call_may_have_a_shorter_timeout(caller: Mesh, gate: Gate) -> None:
    for _ in range(3):
        with pytest.raises(rpc.RpcTimeoutError):
            rpc.rpc_sync(1, nested, (gate, 0.02), timeout=0.5)
        assert "(20 ms)" in str(_nested.get(timeout=10))
    opener = threading.Timer(0.1, gate.open)
    opener.start()
    rpc.rpc_sync(1, nested, (gate, 0), timeout=0)
    opener.join()
    assert _nested.get(timeout=10) is None
