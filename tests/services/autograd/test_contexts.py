"""Contexts: their ids, what they refuse, their end, and what is left of calls after that."""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    UNKNOWN,
    W,
    X,
    assert_freed,
    call,
    gradients,
    holders,
    layer,
    layers,
    settle,
)
from tests.support.gates import Gate
from tests.support.identity import here
from tests.support.io_threads import io_thread_held
from tests.support.waiting import until
from zrpc.optim import DistributedOptimizer, clip_grad_norm_
from zrpc.services.autograd.contexts import PASS_LAYOUT
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind, Tag

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def draw(count: int) -> list[int]:
    ids = []
    for _ in range(count):
        with dist_autograd.context() as context_id:
            ids.append(context_id)
    return ids


def test_ids_are_those_of_torch(mesh: Mesh) -> None:
    """Also if many threads draw at the same worker."""
    for rank in range(3):
        assert mesh.run(rank, draw, 3) == [(rank << 48) + number for number in range(3)]

    def draw_here(_: int) -> list[int]:
        with mesh.agent(1).as_current():
            return draw(50)

    with ThreadPoolExecutor(8) as pool:
        found = [each for drawn in pool.map(draw_here, range(8)) for each in drawn]
    assert sorted(found) == [(1 << 48) + number for number in range(3, 403)]


def test_contexts_are_not_nested(caller: Mesh) -> None:
    """A handler is in its caller's. The same object can be used for many blocks, as torch's."""
    assert isinstance(dist_autograd.context, type)
    assert dist_autograd.is_available()
    context = dist_autograd.context()

    def nest() -> None:
        with pytest.raises(RuntimeError, match="Already have an autograd context id for this"):
            draw(1)

    with context as first:
        nest()
        call("worker1", nest)
        call("worker2", call, "worker1", nest)
        with pytest.raises(RuntimeError, match="Already have"):
            context.__enter__()
        assert dist_autograd.get_gradients(first) == {}
    with pytest.raises(KeyError), context:
        raise KeyError("in the block")
    with context as last:
        dist_autograd.backward(last, [call("worker1", layer, 1, X).sum()])
        found = dist_autograd.get_gradients(last)
        gradient = found.pop(X)
        assert set(dist_autograd.get_gradients(last)) == {X}  # `found` was a copy
    assert last == first + 2
    torch.testing.assert_close(gradient, torch.autograd.grad(layer(1, X).sum(), X)[0])
    assert len(call("worker1", draw, 1)) == 1
    assert_freed(caller)


def test_without_an_agent() -> None:
    for use in (
        dist_autograd.context().__enter__,
        lambda: dist_autograd.get_gradients(0),
        lambda: dist_autograd.backward(0, [X.sum()]),
    ):
        with pytest.raises(RuntimeError, match="RPC has not been initialized"):
            use()


def test_contexts_that_are_unknown_or_have_ended(caller: Mesh) -> None:
    with dist_autograd.context() as ended:
        loss = call("worker1", layer, 1, X).sum()
        dist_autograd.backward(ended, [loss])
    for context_id in (ended, 99, -1, 1 << 48, (1 << 62) + 1):
        with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
            dist_autograd.get_gradients(context_id)
        with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
            dist_autograd.backward(context_id, [loss])
    assert_freed(caller)
    with pytest.raises(RuntimeError, match=UNKNOWN):
        caller.run(1, dist_autograd.get_gradients, ended)


def test_what_is_no_id_of_a_context(caller: Mesh) -> None:
    rrefs = [zrpc.remote(rank, torch.ones, ((),), {"requires_grad": True}) for rank in (0, 1)]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    wrong: list[Any] = ["a", 1.5, dist_autograd.context(), [X.sum()]]
    with dist_autograd.context():
        uses: list[Callable[[Any], object]] = [
            lambda value: dist_autograd.backward(value, [X.sum()]),
            dist_autograd.get_gradients,
            optimizer.step,
            lambda value: clip_grad_norm_(value, rrefs, 1.0),
            *(rref.backward for rref in rrefs),
        ]
        for use, value in itertools.product(uses, wrong):
            found = f"expected context_id: int, found {type(value).__name__}: use the value of"
            with pytest.raises(TypeError, match=found):
                use(value)


def test_torchs_own_backward_on_what_was_received(caller: Mesh) -> None:
    with dist_autograd.context():
        loss = call("worker1", layer, 1, X).sum()
        with pytest.raises(RuntimeError, match=r"zrpc\.autograd\.backward"):
            loss.backward()
    assert X.grad is None


def test_backward_begins_at_a_worker_that_did_not_make_the_context(caller: Mesh) -> None:
    def there(x: Any) -> None:
        dist_autograd.backward([(layer(1, x) * call("worker2", layer, 2, x)).sum()])

    with dist_autograd.context() as context_id:
        call("worker1", there, X * 2)
        assert holders(caller, context_id) == [{X}, {W[1]}, {W[2]}]
    assert_freed(caller)


@pytest.mark.parametrize("context_id", [77 << 48, -1, (1 << 48) + (5 << 32)])
def test_a_message_about_a_context_that_nobody_can_have_made(mesh: Mesh, context_id: int) -> None:
    """It is refused, and nothing is kept of it."""
    agent = mesh.agent(0)
    to = agent.membership.find("worker1")
    graph = Tag.GRAPH, struct.pack("<qQ", context_id, 0)
    for extension in (graph, (Tag.PASS, PASS_LAYOUT.pack(context_id, 1, 0))):
        with agent.as_current(), pytest.raises(zrpc.ProtocolError, match="expected the id of a"):
            agent.caller.call(to, Kind.CALL, (max, (1, 2), {}), 20, extension=extension)
    assert_freed(mesh)


# Calls whose context ends before they do.

ENDED = "whose context had ended"


class HeldLayer(Gate):
    """A layer of worker1 that waits until the test lets it go on."""

    def __call__(self, x: torch.Tensor) -> dict[str, Any]:
        self.wait_inside()
        return {"numbers": [1, layer(1, x)]}


@pytest.fixture
def held() -> Iterator[HeldLayer]:
    with HeldLayer() as held:
        yield held


def tensor_of(value: dict[str, Any]) -> torch.Tensor:
    """The tensor in a `HeldLayer`'s value, which has arrived as it was sent."""
    found: torch.Tensor = value["numbers"][1]
    torch.testing.assert_close(found.detach(), layer(1, X).detach())
    return found


def assert_refused(*reads: Callable[[], dict[str, Any]]) -> None:
    """No pass goes through what is read: neither one of another context, nor torch's own."""
    for read in reads:
        with dist_autograd.context() as context_id:
            tensor = tensor_of(read())
            loss = (tensor * call("worker2", layer, 2, X)).sum()
            with pytest.raises(zrpc.RpcError, match=ENDED):
                dist_autograd.backward(context_id, [loss])
            with pytest.raises(zrpc.RpcError):
                tensor.sum().backward()  # type: ignore[no-untyped-call]
        assert tensor.requires_grad
        assert not tensor.is_leaf


def begin_in_a_context(fn: Any, finish: bool = False) -> tuple[Any, Any]:
    """Calls worker1; returns a future and an RRef, or functions that return their values."""
    with dist_autograd.context():
        future, rref = zrpc.rpc_async("worker1", fn, (X,)), zrpc.remote("worker1", fn, (X,))
        if finish:
            values = future.wait(), rref.to_here()
            return lambda: values[0], lambda: values[1]
    return future, rref


def test_answers_that_come_before_the_end(caller: Mesh, held: HeldLayer) -> None:
    held.open()
    assert_refused(*begin_in_a_context(held, finish=True))
    assert_freed(caller)


def test_answers_that_come_after_the_end(caller: Mesh, held: HeldLayer) -> None:
    future, rref = begin_in_a_context(held)
    held.await_entry()
    assert_freed(caller)
    held.open()
    assert_refused(future.wait, rref.to_here)
    assert_freed(caller)


def test_answers_of_a_worker_that_has_not_learnt_of_the_end(mesh: Mesh, held: HeldLayer) -> None:
    future, rref = mesh.run(0, begin_in_a_context, held)
    held.await_entry()
    with io_thread_held(mesh, 1):
        until(lambda: not layers(mesh)[0])
        held.open()
        until(future.done)
    mesh.run(0, assert_refused, future.wait, rref.to_here)
    assert_freed(mesh)


def test_a_call_that_a_handler_makes_after_the_end(mesh: Mesh, held: HeldLayer) -> None:
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

    future, rref = mesh.run(0, begin_in_a_context, here(at_worker1))
    held.await_entry()
    assert_freed(mesh)
    held.open()
    mesh.run(0, assert_refused, future.wait, rref.to_here)
    assert len(seen) == 4
    settle(mesh)
    assert_freed(mesh)


def test_a_pass_that_does_not_reach_it_is_as_without(caller: Mesh, held: HeldLayer) -> None:
    future, _ = begin_in_a_context(held)
    assert_freed(caller)
    held.open()
    expected = torch.autograd.grad((layer(1, X).detach() * layer(2, X)).sum(), [X])[0]
    value = tensor_of(future.wait())
    with dist_autograd.context() as context_id:
        call("worker2", layer, 2, value)
        loss = (value.detach() * call("worker2", layer, 2, X)).sum()
        dist_autograd.backward(context_id, [loss])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[X], expected)


# The end frees what contexts held, at all workers.


def test_the_end_frees_workers_that_only_others_know(caller: Mesh) -> None:
    """Calls without tensors take a worker part too."""
    with dist_autograd.context():
        call("worker1", call, "worker2", call, "worker1", max, 1, 2)
        until(lambda: [len(layer) for layer in layers(caller)] == [1, 1, 1])
    assert_freed(caller)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_context_held_is_freed(mesh: Mesh, fails: bool) -> None:
    """Its state, activations at all workers, gradients, and messages that nobody asked for."""
    watched = []

    def watch(value: Any) -> Any:
        watched.append(weakref.ref(value))
        return value

    def there(x: Any) -> Any:
        y = watch(watch(x) * watch(W[1] * 2)[0])
        if fails:
            y.register_hook(lambda _: 1 / 0)
        return y

    def run() -> None:
        with dist_autograd.context() as context_id:
            far = watch(call("worker1", there, watch(X * 2)))
            call("worker1", there, watch(X * 3))
            raises = pytest.raises(RuntimeError, match="Error on Node 1")
            with raises if fails else contextlib.nullcontext():
                dist_autograd.backward(context_id, [far.sum()], retain_graph=True)
            for gradient in gradients(mesh, context_id).values():
                watch(gradient)
            for service in layers(mesh)[:2]:
                watch(service.contexts.find(context_id))

    mesh.run(0, run)
    assert len(watched) == (11 if fails else 13)
    assert_freed(mesh)
    until(lambda: not any(ref() is not None for ref in watched), "all is freed", collect=True)


class SlowSet(set[int]):
    """Workers to which worker2 is added slowly."""

    def __init__(self, workers: set[int], gate: Gate) -> None:
        super().__init__(workers)
        self._gate = gate

    def add(self, peer: int) -> None:
        if peer == 2:
            self._gate.wait_inside()
        super().add(peer)


def test_a_context_ends_as_a_handler_brings_another_worker_in(caller: Mesh) -> None:
    """The end must go to that worker, too."""
    service, gate = layers(caller)[1], Gate()
    received = service.agent.dispatcher.received

    def bring_in(x: Any) -> Any:
        state = service.contexts.find(service.contexts.current())
        state.peers = SlowSet(state.peers, gate)
        return call("worker2", layer, 2, x).detach()

    with dist_autograd.context():
        future = zrpc.rpc_async("worker1", here(bring_in), (X,))
        gate.await_entry()
        before = received[0]
    until(lambda: received[0] > before, "the end has come to worker1")
    gate.open()
    future.wait()
    settle(caller)
    assert_freed(caller)
