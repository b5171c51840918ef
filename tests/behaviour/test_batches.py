"""Calls of batched functions: what each caller gets, and what becomes of those that leave."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import busy, stats_of
from tests.support.targets import Unreadable, echo
from tests.support.waiting import SOON, until
from tests.support.ways import Call, ways
from zrpc.testing import Mesh

# Longer than any test: such a batch begins when it is full.
FULL = SOON * 10


class Seen:
    """What the functions below note."""

    sizes: list[int]
    threads: set[int]
    calls: list[rpc.Call]


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    Seen.sizes, Seen.threads, Seen.calls = [], set(), []


@rpc.batched(max_size=3, max_wait=FULL)
def three(values: list[Any]) -> list[Any]:
    Seen.sizes.append(len(values))
    return [(value, len(values)) for value in values]


@rpc.functions.batched(max_size=3, max_wait=FULL)
async def three_async(values: list[Any]) -> list[Any]:
    Seen.sizes.append(len(values))
    await asyncio.sleep(0)
    return [(value, len(values)) for value in values]


@rpc.batched
def soon(values: list[Any], more: list[Any] = []) -> list[Any]:  # noqa: B006
    Seen.sizes.append(len(values))
    return [value * 2 for value in values]


@rpc.batched(max_wait=0)
def at_once(values: list[Any]) -> list[Any]:
    return [value * 2 for value in values]


@rpc.batched(max_size=2, max_wait=FULL)
def returns(results: list[Any]) -> Any:
    return results[0]


@rpc.batched(max_size=2, max_wait=FULL)
def exceptions(values: list[Any]) -> list[Any]:
    return [ValueError(value) if value == "bad" else value for value in values]


@rpc.batched(max_size=2, max_wait=FULL)
def raises(values: list[Any]) -> list[Any]:
    raise KeyError(*values)


@rpc.batched(max_size=2, max_wait=FULL)
def notes_call(values: list[Any]) -> list[Any]:
    Seen.calls.append(rpc.current_call())
    return [rpc.current_call().time_remaining() for _ in values]


class Policy:
    def __init__(self, bias: int = 0) -> None:
        self.bias = bias

    @rpc.batched(max_size=2, max_wait=FULL)
    def act(self, values: list[int], *, scale: list[int]) -> list[int]:
        assert isinstance(self, Policy)
        return [value * s + self.bias for value, s in zip(values, scale, strict=True)]

    @rpc.batched(max_size=2, max_wait=FULL)
    async def act_async(self, values: list[int]) -> list[int]:
        return [value + self.bias for value in values]

    @classmethod
    @rpc.batched(max_size=2, max_wait=FULL)
    def of_class(cls, values: list[int]) -> list[str]:
        return [f"{cls.__name__}{value}" for value in values]

    @staticmethod
    @rpc.batched(max_size=2, max_wait=FULL)
    def static(values: list[int]) -> list[int]:
        return [len(values)] * len(values)


class Better(Policy):
    @rpc.batched(max_size=2, max_wait=FULL)
    def act(self, values: list[int], *, scale: list[int]) -> list[int]:
        return [super(Better, self).act(v, scale=s) + 1 for v, s in zip(values, scale, strict=True)]


def call_all(function: Any, *values: Any, to: int = 1) -> list[rpc.Future[Any]]:
    return [rpc.rpc_async(to, function, (value,)) for value in values]


def results(futures: list[rpc.Future[Any]]) -> list[Any]:
    return [future.wait() for future in futures]


# -- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [three, three_async])
@pytest.mark.parametrize("to", [0, 1])
def test_calls_that_fill_a_batch_become_one(shared: Mesh, function: Any, to: int) -> None:
    found = results(call_all(function, 0, 1, 2, 3, 4, 5, to=to))
    assert found == [(value, 3) for value in range(6)]
    assert Seen.sizes == [3, 3]


@ways
def test_any_way_of_calling(shared: Mesh, call: Call) -> None:
    assert call(1, soon, (4,)) == 8
    assert call(1, at_once, ("a",)) == "aa"


def test_calls_of_several_workers_are_in_one_batch(mesh: Mesh) -> None:
    futures = []
    for rank in range(2):
        with mesh.agent(rank).as_current():
            futures += call_all(three, rank)
    with mesh.agent(0).as_current():
        futures += call_all(three, "last")
    assert results(futures) == [(0, 3), (1, 3), ("last", 3)]


def test_calls_with_other_arguments_are_in_other_batches(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, soon, (1,)), rpc.rpc_async(1, soon, (2, 3))]
    assert results(futures) == [2, 4]
    assert Seen.sizes == [1, 1]


def test_a_function_that_is_sent_by_value_is_batched_too(shared: Mesh) -> None:
    offset = 5

    @rpc.batched(max_size=2, max_wait=FULL)
    def local(values: list[int]) -> list[Any]:
        return [(value + offset, len(values)) for value in values]

    assert results(call_all(local, 1, 2)) == [(6, 2), (7, 2)]


class Adder:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, values: list[int]) -> list[int]:
        return add_to_all(self.number, values)


def add_to_all(number: int, values: list[int]) -> list[int]:
    return [number + value for value in values if value >= 0]


@pytest.mark.parametrize("adds", [partial(add_to_all, 10), Adder(10)])
def test_whatever_can_be_called_can_be_batched(shared: Mesh, adds: Any) -> None:
    function = rpc.batched(adds, max_wait=0)
    assert rpc.rpc_sync(1, function, (3,)) == function(3) == 13
    for call in (lambda: rpc.rpc_sync(1, function, (-1,)), lambda: function(-1)):
        with pytest.raises(rpc.RpcError, match=rf"batched function {type(adds).__name__}, one for"):
            call()


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_waiting_calls_take_no_thread_and_join_the_batch_that_waits_for_one(caller: Mesh) -> None:
    waiting = call_all(three, 1, 2)
    until(lambda: busy(caller) == 2)
    assert rpc.rpc_sync(1, echo, (2,)) == 2  # by the only thread
    until(lambda: stats_of(caller, 1).threads.running <= 1)
    results(call_all(three, 3))
    assert results(waiting) == [(1, 3), (2, 3)]


def test_methods(shared: Mesh) -> None:
    rref = rpc.remote(1, Policy, (100,))
    methods = rref.rpc_async()
    assert results([methods.act(1, scale=2), methods.act(2, scale=3)]) == [102, 106]
    assert results([methods.act_async(1), methods.act_async(2)]) == [101, 102]
    assert results([methods.of_class(1), methods.of_class(2)]) == ["Policy1", "Policy2"]
    assert results([methods.static(1), methods.static(2)]) == [2, 2]
    made = [rref.remote().act(3, scale=1) for _ in range(2)]
    assert [each.to_here() for each in made] == [103, 103]
    assert results(call_all(Policy.of_class, 5, 6)) == ["Policy5", "Policy6"]


def test_objects_have_batches_of_their_own(shared: Mesh) -> None:
    one, two = rpc.remote(1, Policy, (10,)), rpc.remote(1, Better, (20,))
    futures = [each.rpc_async().act(1, scale=1) for each in (one, two, one, two)]
    assert results(futures) == [11, 22, 11, 22]


def test_called_by_its_own_worker_it_takes_and_returns_single_values() -> None:
    assert three(1) == asyncio.run(three_async(1)) == (1, 1)
    assert Better(1).act(2, scale=3) == Policy(1).act(2, scale=3) + 1 == 8
    assert Policy.of_class(1) == "Policy1"
    assert Policy(1).static(2) == 1
    with pytest.raises(ValueError, match="bad"):
        exceptions("bad")
    assert three.__name__ == "three"


def test_options_that_are_not_possible() -> None:
    wrong: list[tuple[str, object]] = [("max_size", 0), ("max_size", 1.5)]
    wrong += [("max_wait", value) for value in (-1, timedelta(-1), math.nan, None, "1")]
    for name, value in wrong:
        with pytest.raises(rpc.OptionError, match=r"must be .* but got"):
            rpc.batched(**{name: value})(echo)  # type: ignore[call-overload]
    with pytest.raises(rpc.OptionError, match="expected a function to batch, found 32"):
        rpc.batched(32)


# -- tensors ---------------------------------------------------------------------------------


@rpc.batched(max_size=2, max_wait=FULL, stack=True)
def doubled(tensors: dict[str, torch.Tensor]) -> Any:
    Seen.sizes.append(tensors["x"].shape[0])
    return {"y": tensors["x"] * 2}, tensors["x"].sum(dim=1)


def test_tensors_are_stacked_and_other_shapes_make_other_batches(shared: Mesh) -> None:
    given = [torch.full((n,), float(n)) for n in (2, 3, 2, 3)]
    for tensor, (tree, total) in zip(
        given, results(call_all(doubled, *({"x": each} for each in given))), strict=True
    ):
        assert torch.equal(tree["y"], tensor * 2)
        assert total == tensor.sum()
    assert Seen.sizes == [2, 2]
    tree, total = doubled({"x": torch.ones(4)})
    assert (tree["y"].shape, total) == ((4,), 4)


weight = torch.nn.Parameter(torch.tensor([2.0]))


@rpc.batched(max_size=2, max_wait=FULL, stack=True)
def weighted(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * weight


def gradient_of_weight(context: int) -> float:
    return rpc.autograd.get_gradients(context)[weight].item()


def test_batches_carry_gradients_of_their_context_only(shared: Mesh) -> None:
    inputs = [torch.tensor([float(n)], requires_grad=True) for n in range(4)]

    def step(first: rpc.Future[Any], context: int, n: int) -> None:
        second = rpc.rpc_async(1, weighted, (inputs[n + 1],))
        rpc.autograd.backward(context, [first.wait() * 3 + second.wait()])
        gradients = rpc.autograd.get_gradients(context)
        assert [gradients[inputs[i]].item() for i in (n, n + 1)] == [6.0, 2.0]
        assert rpc.rpc_sync(1, gradient_of_weight, (context,)) == 3 * n + n + 1

    def other() -> None:
        with shared.agent(1).as_current(), rpc.autograd.context() as context:
            first = rpc.rpc_async(1, weighted, (inputs[2],))
            step(first, context, 2)

    with rpc.autograd.context() as context, ThreadPoolExecutor(1) as executor:
        first = rpc.rpc_async(1, weighted, (inputs[0],))
        until(lambda: busy(shared) == 1)
        executor.submit(other).result(SOON)  # its calls don't fill the batch of this context
        step(first, context, 0)


# -- errors ----------------------------------------------------------------------------------


def test_an_exception_in_the_list_is_raised_by_its_own_call(shared: Mesh) -> None:
    good, bad = call_all(exceptions, "good", "bad")
    assert good.wait() == "good"
    with pytest.raises(ValueError, match="bad") as info:
        bad.wait()
    assert isinstance(info.value.__cause__, rpc.RemoteError)


def test_what_the_function_raises_all_calls_raise_and_it_is_logged_once(
    shared: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "zrpc.calls.callee")
    rrefs = [rpc.remote(1, raises, (1,)), rpc.remote(1, raises, (2,))]
    for rref in rrefs:
        with pytest.raises(KeyError):
            rref.to_here()
    assert caplog.text.count("a call of raises failed") == 1
    for future in call_all(raises, 1, 2):
        with pytest.raises(KeyError) as info:
            future.wait()
        assert sorted(info.value.args) == [1, 2]
    assert caplog.text.count("a call of raises failed") == 2


def test_a_wrong_number_of_results_fails_all(shared: Mesh) -> None:
    text = r"expected a list of 2 results .*returns.*found"
    for result in ([1, 2, 3], None):
        for future in call_all(returns, result, result):
            with pytest.raises(rpc.RpcError, match=text):
                future.wait()
    assert sorted(results(call_all(returns, [3, 4], [3, 4]))) == [3, 4]


def test_a_result_that_can_not_be_sent_fails_its_own_call(shared: Mesh) -> None:
    outcomes = []
    for future in call_all(returns, LazyResults(), LazyResults()):
        try:
            outcomes.append(future.wait())
        except rpc.SerializationError:
            outcomes.append("not sent")
    assert sorted(outcomes) == ["not sent", "sent"]


class LazyResults(list[Any]):
    """Becomes a list with a result that can't be pickled, once it has arrived."""

    def __reduce__(self) -> Any:
        return _unpicklable, ()


def _unpicklable() -> list[Any]:
    return ["sent", threading.Lock()]


def test_arguments_that_can_not_be_read_fail_their_own_call(shared: Mesh) -> None:
    waiting = call_all(three, 1, 2)
    with pytest.raises(rpc.SerializationError):
        rpc.rpc_sync(1, three, (Unreadable(),))
    assert results(call_all(three, 3)) == [(3, 3)]
    assert results(waiting) == [(1, 3), (2, 3)]


# -- calls that leave ------------------------------------------------------------------------


def test_a_call_that_is_cancelled_or_times_out_leaves_its_batch(shared: Mesh) -> None:
    stays, leaves = call_all(three, "stays", "leaves")
    until(lambda: busy(shared) == 2)
    assert leaves.cancel()
    until(lambda: busy(shared) == 1)
    with pytest.raises(rpc.RpcTimeoutError):
        rpc.rpc_sync(1, three, ("leaves",), timeout=0.05)
    until(lambda: busy(shared) == 1)
    assert results(call_all(three, 1, 2)) == [(1, 3), (2, 3)]
    assert stays.wait() == ("stays", 3)
    assert Seen.sizes == [3]


@pytest.mark.zrpc(workers=3)
def test_the_calls_of_a_dead_caller_leave_their_batch(caller: Mesh) -> None:
    stays = rpc.rpc_async(1, three, ("stays",))
    with caller.agent(2).as_current():
        rpc.rpc_async(1, three, ("leaves",))
        until(lambda: busy(caller) == 2)
        caller.agent(2).shutdown(graceful=False)
    until(lambda: busy(caller) == 1)
    assert results(call_all(three, 1, 2)) == [(1, 3), (2, 3)]
    assert stays.wait() == ("stays", 3)


@rpc.batched(max_size=2, max_wait=FULL)
def wait_for(gates: list[Gate]) -> list[Any]:
    Seen.calls.append(rpc.current_call())
    gates[0].work_inside()
    return [rpc.current_call().cancelled for _ in gates]


@rpc.batched(max_size=2, max_wait=FULL)
async def wait_async(gates: list[Gate]) -> list[Any]:
    try:
        gates[0].entered.release()
        await asyncio.sleep(SOON)
    except asyncio.CancelledError:
        gates[0].open()
        raise
    return gates


def test_a_batch_that_runs_is_cancelled_once_all_its_callers_have_gone(
    shared: Mesh, gate: Gate
) -> None:
    one, two = call_all(wait_for, gate, gate)
    gate.await_entry()
    assert one.cancel()
    rpc.rpc_sync(1, echo)  # behind the cancellation
    assert not Seen.calls[0].cancelled
    assert two.cancel()
    until(lambda: Seen.calls[0].cancelled)
    gate.open()
    until(lambda: not busy(shared))


def test_a_coroutine_is_cancelled_once_all_its_callers_have_gone(shared: Mesh, gate: Gate) -> None:
    futures = call_all(wait_async, gate, gate)
    gate.await_entry()
    for future in futures:
        assert future.cancel()
    assert gate.opened.wait(SOON)
    until(lambda: not busy(shared))


def test_each_call_has_its_own_deadline_and_the_batch_the_latest(shared: Mesh) -> None:
    first = rpc.rpc_async(1, notes_call, (1,), timeout=100)
    second = rpc.rpc_async(1, notes_call, (2,), timeout=50)
    for future in (first, second):
        assert 50 < future.wait() <= 100
    assert Seen.calls[0].caller.name == "worker0"


def test_a_call_may_time_out_while_its_batch_runs(shared: Mesh, gate: Gate) -> None:
    patient = rpc.rpc_async(1, wait_for, (gate,))
    leaving = rpc.rpc_async(1, wait_for, (gate,), timeout=0.3)
    gate.await_entry()
    with pytest.raises(rpc.RpcTimeoutError):
        leaving.wait()
    gate.open()
    assert patient.wait() is False


def test_a_shutdown_waits_for_a_batch(caller: Mesh) -> None:
    future = rpc.rpc_async(1, soon, (21,))
    caller.shutdown()
    assert future.wait() == 42
