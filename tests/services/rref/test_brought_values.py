"""The answer of the call that makes a value brings the value, if no one else can change it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

import zrpc
import zrpc.autograd
from tests.services.rref.tracked import assert_empty
from tests.support.gates import Gate
from tests.support.waiting import until
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=2)

ARRAY = numpy.zeros(2, dtype=numpy.float32)
KEPT: dict[str, Any] = {}
SHARED = torch.zeros(2)


def add_one() -> None:
    SHARED.add_(1)


def shared() -> torch.Tensor:
    return SHARED


def part_of_shared() -> torch.Tensor:
    return SHARED[:1]


def fresh() -> torch.Tensor:
    return torch.zeros(2)


def seven() -> int:
    return 7


def seven_after(seconds: float) -> int:
    threading.Event().wait(seconds)
    return 7


def sometimes(raises: bool) -> int:
    if raises:
        raise KeyError("on purpose")
    return 1


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def view_of_array() -> torch.Tensor:
    return torch.from_numpy(ARRAY)


def add_to_array() -> None:
    ARRAY[:] += 1


def kept_storage() -> torch.Tensor:
    tensor = torch.zeros(2)
    KEPT["storage"] = tensor.untyped_storage()
    return tensor


def add_to_storage() -> None:
    torch.empty(0).set_(KEPT["storage"]).add_(1)


def add_to(rref: zrpc.RRef[torch.Tensor]) -> None:
    rref.local_value().add_(1)


@pytest.fixture(autouse=True)
def _start_over() -> Iterator[None]:
    yield
    KEPT.clear()
    SHARED.zero_()
    ARRAY[:] = 0


def fetch(function: Any, *args: Any) -> Any:
    return zrpc.remote(1, function, args=args).to_here()


def arrived(mesh: Mesh) -> list[int]:
    """How many messages have arrived on each worker."""
    return [sum(mesh.agent(name).dispatcher.received.values()) for name in mesh]


def asked_for(mesh: Mesh, function: Any, *args: Any) -> Any:
    """Has a value made and fetched, so that worker 0 wants the next one with the answer."""
    return mesh.run(0, fetch, function, *args)


# From Python 3.14 on, functions borrow references. So a tensor does not show that it is sole.
_TENSOR = pytest.param(
    fresh, marks=pytest.mark.skipif(sys.version_info >= (3, 14), reason="a tensor is fetched")
)


@pytest.mark.parametrize("function", [_TENSOR, seven], ids=["fresh", "seven"])
def test_a_value_is_made_fetched_and_dropped_with_two_messages(mesh: Mesh, function: Any) -> None:
    expected = asked_for(mesh, function)

    def repeat() -> None:
        for _ in range(10):
            assert torch.equal(torch.as_tensor(fetch(function)), torch.as_tensor(expected))

    mesh.run(0, repeat)  # connects, and sends what is left of before
    before = arrived(mesh)
    mesh.run(0, repeat)
    # An I/O thread that is woken in between may send a DELETE by itself.
    back, there = (now - then for now, then in zip(arrived(mesh), before, strict=True))
    assert back == 10
    assert 10 <= there <= 20
    assert_empty(mesh)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (shared, add_one),
        (part_of_shared, add_one),
        (view_of_array, add_to_array),
        (kept_storage, add_to_storage),
    ],
)
def test_to_here_returns_no_value_older_than_its_call(
    mesh: Mesh, function: Callable[[], torch.Tensor], change: Callable[[], None]
) -> None:
    def change_in_between() -> torch.Tensor:
        rref = zrpc.remote(1, function)
        until(rref.confirmed_by_owner, "the answer has arrived")
        zrpc.rpc_sync(1, change)
        return rref.to_here().clone()

    for expected in 1, 2, 3:  # wanted from the second time on
        value = mesh.run(0, change_in_between)
        assert value[0] == (1 if function is kept_storage else expected)


def test_the_value_is_fetched_after_a_method_was_called(mesh: Mesh) -> None:
    asked_for(mesh, fresh)

    def call_method(kind: str) -> torch.Tensor:
        rref = zrpc.remote(1, fresh)
        until(rref.confirmed_by_owner, "the answer has arrived")
        called = getattr(rref, kind)().add_(1)
        if kind == "rpc_async":
            called.wait()
        elif kind == "remote":
            called.to_here()
        return rref.to_here()

    for kind in ("rpc_sync", "rpc_async", "remote"):
        assert mesh.run(0, call_method, kind).tolist() == [1, 1]


def test_the_value_is_fetched_after_the_rref_was_sent(mesh: Mesh) -> None:
    asked_for(mesh, fresh)

    def send() -> torch.Tensor:
        rref = zrpc.remote(1, fresh)
        until(rref.confirmed_by_owner, "the answer has arrived")
        zrpc.rpc_sync(1, add_to, args=(rref,))
        return rref.to_here()

    assert mesh.run(0, send).tolist() == [1, 1]


def test_each_to_here_returns_a_copy_of_its_own(mesh: Mesh) -> None:
    asked_for(mesh, fresh)

    def twice() -> torch.Tensor:
        rref = zrpc.remote(1, fresh)
        rref.to_here().add_(1)
        return rref.to_here()

    assert mesh.run(0, twice).tolist() == [0, 0]


def test_an_error_is_raised_though_a_value_was_wanted(mesh: Mesh) -> None:
    for raises in (False, True, True):
        if raises:
            with pytest.raises(KeyError, match="on purpose"):
                mesh.run(0, fetch, sometimes, True)
        else:
            assert mesh.run(0, fetch, sometimes, False) == 1
    assert_empty(mesh)


def test_a_fetch_times_out_by_itself_while_the_value_is_made(mesh: Mesh) -> None:
    with Gate() as gate:
        gate.open()
        assert asked_for(mesh, gate.wait_inside, 1) == 1
    with Gate() as gate:

        def impatient() -> int:
            rref = zrpc.remote(1, gate.wait_inside, args=(2,))
            with pytest.raises(zrpc.RpcTimeoutError):
                rref.to_here(timeout=0.05)
            gate.open()
            return rref.to_here()

        assert mesh.run(0, impatient) == 2


@pytest.mark.zrpc(workers=2, processes=True)
def test_a_fetch_fails_with_an_owner_that_is_killed_while_it_makes_the_value(mesh: Mesh) -> None:
    assert asked_for(mesh, seven_after, 0.0) == 7
    value = mesh.submit(0, fetch, seven_after, 60.0)
    mesh.kill(1)
    with pytest.raises(zrpc.WorkerDied):
        value.result(timeout=60)


def test_a_wanted_value_in_a_context_of_autograd_has_its_gradient(mesh: Mesh) -> None:
    asked_for(mesh, double, torch.ones(2))

    def step() -> torch.Tensor:
        weight = torch.ones(2, requires_grad=True)
        with zrpc.autograd.context() as context_id:
            loss = fetch(double, weight).sum()
            zrpc.autograd.backward(context_id, [loss])
            return zrpc.autograd.get_gradients(context_id)[weight]

    assert mesh.run(0, step).tolist() == [2, 2]
