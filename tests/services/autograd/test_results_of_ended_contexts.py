"""What is left of a call whose context has ended: its value can be used, but has no gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    SOON,
    W,
    X,
    assert_freed,
    call,
    layer,
    layers,
)
from tests.support.identity import Same, here
from tests.support.waiting import until
from zrpc.services.autograd.service import AutogradService
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

ENDED = "whose context had ended"


class Held(Same):
    """A layer of worker1 that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self._may_go_on = threading.Event(), threading.Event()

    def __call__(self, x: torch.Tensor) -> dict[str, Any]:
        self.entered.set()
        assert self._may_go_on.wait(SOON)
        return {"numbers": [1, layer(1, x)]}

    def go_on(self) -> None:
        self._may_go_on.set()


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.go_on()


@contextmanager
def receiving_nothing(mesh: Mesh, rank: int) -> Iterator[None]:
    """Holds up what comes to a worker."""
    held, may_go_on = threading.Event(), threading.Event()
    mesh.agent(rank).receiver.in_io_thread(lambda: (held.set(), may_go_on.wait(SOON)))
    assert held.wait(SOON)
    try:
        yield
    finally:
        may_go_on.set()


def tensor_of(value: dict[str, Any]) -> torch.Tensor:
    """The tensor in a `Held`'s value, which has arrived as it was sent."""
    found: torch.Tensor = value["numbers"][1]
    torch.testing.assert_close(found.detach(), layer(1, X).detach())
    return found


def assert_refused(read: Callable[[], dict[str, Any]]) -> None:
    """No pass goes through what is read: neither one of another context, nor torch's own."""
    with dist_autograd.context() as context_id:
        tensor = tensor_of(read())
        loss = (tensor * call("worker2", layer, 2, X)).sum()
        with pytest.raises(zrpc.RpcError, match=ENDED):
            dist_autograd.backward(context_id, [loss])
        with pytest.raises(zrpc.RpcError):
            tensor.sum().backward()  # type: ignore[no-untyped-call]
    assert tensor.requires_grad
    assert not tensor.is_leaf


WAYS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "rpc_async": (zrpc.rpc_async, lambda future: future.wait()),
    "remote": (zrpc.remote, lambda rref: rref.to_here()),
}


def begin_in_a_context(way: str, fn: Any) -> Any:
    with dist_autograd.context():
        return WAYS[way][0]("worker1", fn, (X,))


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_comes_after_the_end(mesh: Mesh, held: Held, way: str) -> None:
    begun = mesh.run(0, begin_in_a_context, way, held)
    assert held.entered.wait(SOON)
    assert_freed(mesh)
    held.go_on()
    mesh.run(0, assert_refused, lambda: WAYS[way][1](begun))
    assert_freed(mesh)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_comes_before_the_end(mesh: Mesh, held: Held, way: str) -> None:
    held.go_on()

    def run() -> Any:
        with dist_autograd.context():
            begun = WAYS[way][0]("worker1", held, (X,))
            return WAYS[way][1](begun)

    value = mesh.run(0, run)
    mesh.run(0, assert_refused, lambda: value)
    assert_freed(mesh)


def test_an_answer_of_a_worker_that_has_not_learnt_of_the_end(mesh: Mesh, held: Held) -> None:
    future = mesh.run(0, begin_in_a_context, "rpc_async", held)
    assert held.entered.wait(SOON)
    with receiving_nothing(mesh, 1):
        until(lambda: not layers(mesh)[0])
        held.go_on()
        until(future.done)
    mesh.run(0, assert_refused, future.wait)
    assert_freed(mesh)


def test_a_call_that_a_handler_makes_after_the_end(mesh: Mesh, held: Held) -> None:
    seen: list[torch.Tensor] = []

    def cannot_go_back(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match=ENDED):
            tensor.sum().backward()  # type: ignore[no-untyped-call]
        seen.append(tensor)
        return tensor

    def at_worker1(x: torch.Tensor) -> Any:
        value = held(x)
        # Both the argument there and the result.
        cannot_go_back(call("worker2", cannot_go_back, x))
        return value

    future = mesh.run(0, begin_in_a_context, "rpc_async", here(at_worker1))
    assert held.entered.wait(SOON)
    assert_freed(mesh)
    held.go_on()
    mesh.run(0, assert_refused, future.wait)
    assert len(seen) == 2
    assert_freed(mesh)


def test_a_call_of_a_callback_after_the_end(mesh: Mesh, held: Held) -> None:
    begun = threading.Event()

    def run() -> Any:
        with dist_autograd.context():
            first = zrpc.rpc_async("worker1", here(lambda: begun.wait(SOON)))
            return first.then(lambda _: call("worker1", held, X))

    held.go_on()
    future = mesh.run(0, run)
    assert_freed(mesh)
    begun.set()
    mesh.run(0, assert_refused, future.wait)
    assert_freed(mesh)


def test_arguments_that_a_handler_has_kept(mesh: Mesh) -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        with dist_autograd.context():
            call("worker1", lambda x: kept.append(x), X)
        with dist_autograd.context() as context_id:
            loss = call("worker1", lambda: (kept[0] * W[1][0]).sum())
            with pytest.raises(RuntimeError, match=ENDED):
                dist_autograd.backward(context_id, [loss])

    mesh.run(0, run)
    assert_freed(mesh)


def test_a_call_of_a_handler_whose_creator_is_gone(mesh: Mesh, held: Held) -> None:
    """worker0 leaves; so the context ends, and then worker1 answers worker2."""
    found: list[Any] = []
    done = threading.Event()

    def at_worker2() -> None:
        found.append(call("worker1", held, X))
        done.set()

    def run() -> None:
        with dist_autograd.context():
            zrpc.remote("worker2", here(at_worker2))  # goes on without its caller
            assert held.entered.wait(SOON)
            zrpc.shutdown(graceful=False)

    mesh.run(0, run)
    services = [mesh.agent(rank).service(AutogradService) for rank in (1, 2)]
    until(lambda: not any(map(len, services)))
    held.go_on()
    assert done.wait(SOON)

    def use() -> None:
        tensor = tensor_of(found[0])
        with dist_autograd.context() as context_id:
            loss = (tensor * call("worker1", layer, 1, X)).sum()
            with pytest.raises(RuntimeError, match=ENDED):
                dist_autograd.backward(context_id, [loss])

    mesh.run(2, use)


def test_a_pass_that_does_not_reach_it_is_as_without(mesh: Mesh, held: Held) -> None:
    future = mesh.run(0, begin_in_a_context, "rpc_async", held)
    assert_freed(mesh)
    held.go_on()

    def run() -> Any:
        value = tensor_of(future.wait())
        with dist_autograd.context() as context_id:
            call("worker2", layer, 2, value)
            loss = (value.detach() * call("worker2", layer, 2, X)).sum()
            dist_autograd.backward(context_id, [loss])
            return dist_autograd.get_gradients(context_id)[X]

    expected = torch.autograd.grad((layer(1, X).detach() * layer(2, X)).sum(), [X])[0]
    torch.testing.assert_close(mesh.run(0, run), expected)
