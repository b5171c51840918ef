"""Contexts: their ids, and what they refuse."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

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
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

# Ids.


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


# Errors.


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


def test_a_handler_is_in_its_callers_context(mesh: Mesh) -> None:
    def nest() -> None:
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            draw(1)

    def run() -> None:
        with dist_autograd.context():
            call("worker1", nest)
            call("worker2", call, "worker1", nest)
        assert len(call("worker1", draw, 1)) == 1

    mesh.run(0, run)


def test_other_threads_have_contexts_of_their_own(mesh: Mesh) -> None:
    found = []

    def in_thread() -> None:
        with mesh.agent(0).as_current():
            found.extend(draw(1))

    def run() -> Any:
        with dist_autograd.context() as context_id:
            thread = threading.Thread(target=in_thread)
            thread.start()
            thread.join(SOON)
            return context_id

    assert found != [mesh.run(0, run)]
    assert len(found) == 1


def test_the_context_ends_if_the_block_raises(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context():
            call("worker1", layer, 1, X)
            raise KeyError("in the block")

    with pytest.raises(KeyError):
        mesh.run(0, run)
    assert_freed(mesh)
    assert mesh.run(0, draw, 1)


def test_one_object_for_many_blocks(mesh: Mesh) -> None:
    """As torch's, which a program may keep, also from before there is an agent."""
    context = dist_autograd.context()

    def run() -> Any:
        with context as first, pytest.raises(RuntimeError, match="Already have"):
            context.__enter__()
        with pytest.raises(KeyError), context:
            raise KeyError("in the block")
        with context as last:
            dist_autograd.backward(last, [call("worker1", layer, 1, X).sum()])
            return first, last, dist_autograd.get_gradients(last)[X]

    first, last, gradient = mesh.run(0, run)
    assert last == first + 2
    torch.testing.assert_close(gradient, torch.autograd.grad(layer(1, X).sum(), X)[0])
    assert_freed(mesh)


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
def test_unknown_contexts(mesh: Mesh, context_id: Any) -> None:
    def run() -> None:
        with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
            dist_autograd.get_gradients(context_id)
        with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
            dist_autograd.backward(context_id, [X.sum()])

    mesh.run(0, run)


def test_a_context_that_has_ended(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = call("worker1", layer, 1, X).sum()
            dist_autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
            dist_autograd.get_gradients(context_id)
        with pytest.raises(RuntimeError, match=f"{UNKNOWN}{context_id}$"):
            dist_autograd.backward(context_id, [loss])
        return context_id

    context_id = mesh.run(0, run)
    assert_freed(mesh)
    with pytest.raises(RuntimeError, match=UNKNOWN):
        mesh.run(1, dist_autograd.get_gradients, context_id)


def test_a_worker_that_took_no_part_does_not_know_the_context(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call("worker1", layer, 1, X).sum()])
            with mesh.agent(2).as_current(), pytest.raises(RuntimeError, match=UNKNOWN):
                dist_autograd.get_gradients(context_id)
            with mesh.agent(1).as_current():
                assert set(dist_autograd.get_gradients(context_id)) == {W[1]}

    mesh.run(0, run)


def test_torchs_own_backward_on_what_was_received(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context():
            loss = call("worker1", layer, 1, X).sum()
            with pytest.raises(RuntimeError, match=r"zrpc\.autograd\.backward"):
                loss.backward()

    mesh.run(0, run)
    assert X.grad is None


def test_get_gradients_gives_a_copy(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call("worker1", layer, 1, X).sum()])
            found = dist_autograd.get_gradients(context_id)
            assert isinstance(found, dict)
            found.clear()
            return set(dist_autograd.get_gradients(context_id))

    assert mesh.run(0, run) == {X}


def test_get_gradients_before_a_pass_is_empty(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            call("worker1", layer, 1, X)
            return dist_autograd.get_gradients(context_id)

    assert mesh.run(0, run) == {}


def test_unused_leaves_are_absent(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = call("worker1", layer, 1, X).sum()
            dist_autograd.backward(context_id, [loss + W[2].sum()])
            return set(dist_autograd.get_gradients(context_id))

    assert mesh.run(0, run) == {X, W[2]}


def test_gradients_are_read_in_another_thread(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call("worker1", layer, 1, X).sum()])
            found = []

            def read() -> None:
                with mesh.agent(0).as_current():
                    found.append(dist_autograd.get_gradients(context_id))

            thread = threading.Thread(target=read)
            thread.start()
            thread.join(SOON)
            return found

    [found] = mesh.run(0, run)
    assert set(found) == {X}


def test_backward_begins_at_a_worker_that_did_not_make_the_context(mesh: Mesh) -> None:
    def there(x: Any) -> None:
        loss = (layer(1, x) * call("worker2", layer, 2, x)).sum()
        context_id = layers(mesh)[1].contexts.current()
        dist_autograd.backward(context_id, [loss])

    def run() -> Any:
        with dist_autograd.context() as context_id:
            call("worker1", there, X * 2)
            return [set(gradients_at(mesh, rank, context_id)) for rank in range(3)]

    assert mesh.run(0, run) == [{X}, {W[1]}, {W[2]}]
    assert_freed(mesh)
