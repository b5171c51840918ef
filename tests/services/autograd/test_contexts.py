"""Contexts: their ids, what they refuse, and what is left of calls whose context has ended."""

from __future__ import annotations

import struct
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
    UNKNOWN,
    W,
    X,
    assert_freed,
    call,
    gradients_at,
    layer,
    layers,
)
from tests.support.identity import Same, here
from tests.support.waiting import until
from zrpc.services.autograd.contexts import PASS_LAYOUT
from zrpc.services.autograd.service import AutogradService
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind, Tag

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def draw(count: Any) -> Any:
    ids = []
    for _ in range(count):
        with dist_autograd.context() as context_id:
            ids.append(context_id)
    return ids


def test_ids_are_those_of_torch(mesh: Mesh) -> None:
    for rank in range(3):
        assert mesh.run(rank, draw, 3) == [(rank << 48) + number for number in range(3)]


def test_ids_are_unique(mesh: Mesh) -> None:
    """Also where backward passes and many threads draw at the same worker."""
    found = []

    def draw_here() -> None:
        with mesh.agent(1).as_current():
            found.extend(draw(50))

    threads = [threading.Thread(target=draw_here) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    found.extend(mesh.run(0, draw, 50))
    assert len(set(found)) == len(found) == 450
    assert all(isinstance(context_id, int) for context_id in found)


def test_contexts_are_not_nested(mesh: Mesh) -> None:
    def nest() -> Any:
        with dist_autograd.context() as outer:
            with (
                pytest.raises(RuntimeError, match="Already have an autograd context id for this"),
                dist_autograd.context(),
            ):
                pytest.fail("nested")
            return outer, dist_autograd.get_gradients(outer)

    _, found = mesh.run(0, nest)
    assert found == {}
    assert mesh.run(0, draw, 1)


def test_a_handler_is_in_its_callers_context(caller: Mesh) -> None:
    def nest() -> None:
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            draw(1)

    with dist_autograd.context():
        call("worker1", nest)
        call("worker2", call, "worker1", nest)
    assert len(call("worker1", draw, 1)) == 1


def test_one_object_for_many_blocks(caller: Mesh) -> None:
    """As torch's, which a program may keep, also from before there is an agent."""
    context = dist_autograd.context()

    with context as first, pytest.raises(RuntimeError, match="Already have"):
        context.__enter__()
    with pytest.raises(KeyError), context:
        raise KeyError("in the block")
    with context as last:
        dist_autograd.backward(last, [call("worker1", layer, 1, X).sum()])
        first, last, gradient = first, last, dist_autograd.get_gradients(last)[X]
    assert last == first + 2
    torch.testing.assert_close(gradient, torch.autograd.grad(layer(1, X).sum(), X)[0])
    assert_freed(caller)


def test_it_is_a_class_as_in_torch() -> None:
    assert isinstance(dist_autograd.context, type)
    assert dist_autograd.is_available()


def test_without_an_agent() -> None:
    with (
        pytest.raises(RuntimeError, match="RPC has not been initialized"),
        dist_autograd.context(),
    ):
        pytest.fail("a context without an agent")
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        dist_autograd.get_gradients(0)
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        dist_autograd.backward(0, [X.sum()])


@pytest.mark.parametrize("context_id", [99, -1, 1 << 48, (1 << 62) + 1])
def test_unknown_contexts(caller: Mesh, context_id: Any) -> None:
    with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
        dist_autograd.get_gradients(context_id)
    with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
        dist_autograd.backward(context_id, [X.sum()])


def test_a_context_that_has_ended(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        loss = call("worker1", layer, 1, X).sum()
        dist_autograd.backward(context_id, [loss])
    with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
        dist_autograd.get_gradients(context_id)
    with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
        dist_autograd.backward(context_id, [loss])
    assert_freed(caller)
    with pytest.raises(RuntimeError, match=UNKNOWN):
        caller.run(1, dist_autograd.get_gradients, context_id)


def test_torchs_own_backward_on_what_was_received(caller: Mesh) -> None:
    with dist_autograd.context():
        loss = call("worker1", layer, 1, X).sum()
        with pytest.raises(RuntimeError, match=r"zrpc\.autograd\.backward"):
            loss.backward()
    assert X.grad is None


def test_get_gradients_gives_a_copy(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [call("worker1", layer, 1, X).sum()])
        found = dist_autograd.get_gradients(context_id)
        assert isinstance(found, dict)
        found.clear()
        assert set(dist_autograd.get_gradients(context_id)) == {X}


def test_backward_begins_at_a_worker_that_did_not_make_the_context(caller: Mesh) -> None:
    def there(x: Any) -> None:
        loss = (layer(1, x) * call("worker2", layer, 2, x)).sum()
        context_id = layers(caller)[1].contexts.current()
        dist_autograd.backward(context_id, [loss])

    with dist_autograd.context() as context_id:
        call("worker1", there, X * 2)
        assert [set(gradients_at(caller, rank, context_id)) for rank in range(3)] == [
            {X},
            {W[1]},
            {W[2]},
        ]
    assert_freed(caller)


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
def test_an_answer_that_comes_before_the_end(caller: Mesh, held: Held, way: str) -> None:
    held.go_on()

    with dist_autograd.context():
        begun = WAYS[way][0]("worker1", held, (X,))
        value = WAYS[way][1](begun)
    caller.run(0, assert_refused, lambda: value)
    assert_freed(caller)


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


def test_arguments_that_a_handler_has_kept(caller: Mesh) -> None:
    kept: list[torch.Tensor] = []

    with dist_autograd.context():
        call("worker1", lambda x: kept.append(x), X)
    with dist_autograd.context() as context_id:
        loss = call("worker1", lambda: (kept[0] * W[1][0]).sum())
        with pytest.raises(RuntimeError, match=ENDED):
            dist_autograd.backward(context_id, [loss])
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
            with pytest.raises(zrpc.WorkerDied, match="which has lost its creator: worker worker0"):
                dist_autograd.backward(context_id, [loss])

    mesh.run(2, use)


def test_a_pass_that_does_not_reach_it_is_as_without(caller: Mesh, held: Held) -> None:
    future = caller.run(0, begin_in_a_context, "rpc_async", held)
    assert_freed(caller)
    held.go_on()

    expected = torch.autograd.grad((layer(1, X).detach() * layer(2, X)).sum(), [X])[0]
    value = tensor_of(future.wait())
    with dist_autograd.context() as context_id:
        call("worker2", layer, 2, value)
        loss = (value.detach() * call("worker2", layer, 2, X)).sum()
        dist_autograd.backward(context_id, [loss])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[X], expected)
