"""Contexts, what they refuse, and their end at all workers."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    SOON,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    gradients_at,
    layer,
    layers,
    leaf,
    settle,
    train,
)
from tests.support.identity import here
from tests.support.waiting import until
from zrpc.services.autograd.state import ContextState
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


UNKNOWN = "Could not find autograd context with id: "


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


def roots_that_fail() -> Any:
    ones = torch.ones(2, requires_grad=True)
    return {
        "none": ([], RuntimeError, "No tensors provided for gradient computation"),
        "no grad": ([torch.ones(())], RuntimeError, "requires_grad not set on root"),
        "no scalar": ([ones * 2], RuntimeError, "is not a scalar, all roots need to be scalar"),
        "empty": ([ones[:0] * 2], RuntimeError, "is not a scalar, all roots need to be scalar"),
        "a leaf": (
            [torch.ones((), requires_grad=True)],
            RuntimeError,
            "does not have a valid gradient function",
        ),
        "second no scalar": ([ones.sum(), ones * 2], RuntimeError, "is not a scalar"),
        "None": (None, TypeError, "incompatible function arguments"),
        "a tensor": (ones.sum(), TypeError, "incompatible function arguments"),
        "numbers": ([1.0], TypeError, "incompatible function arguments"),
    }


@pytest.mark.parametrize("case", list(roots_that_fail()))
def test_roots_that_are_refused(mesh: Mesh, case: Any) -> None:
    roots, kind, text = roots_that_fail()[case]

    def run() -> None:
        with dist_autograd.context() as context_id:
            good = call("worker1", layer, 1, X).sum()
            with pytest.raises(kind, match=text):
                dist_autograd.backward(context_id, roots)
            assert dist_autograd.get_gradients(context_id) == {}
            dist_autograd.backward(context_id, [good])
            assert set(dist_autograd.get_gradients(context_id)) == {X}

    mesh.run(0, run)


def test_a_root_of_one_element_in_any_shape(mesh: Mesh) -> None:
    def model() -> Any:
        return [call("worker1", layer, 1, X).sum().reshape(1, 1, 1), X[:1] * 2]

    assert_as_local(mesh, model, LEAVES)


def test_roots_in_a_tuple(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, (call("worker1", layer, 1, X).sum(),))
            return set(dist_autograd.get_gradients(context_id))

    assert mesh.run(0, run) == {X}


def test_the_older_form_takes_the_current_context(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward([call("worker1", layer, 1, X).sum()])
            return gradients_at(mesh, 0, context_id), gradients_at(mesh, 1, context_id)

    mine, there = mesh.run(0, run)
    assert set(mine) == {X}
    assert set(there) == {W[1]}


def test_the_older_form_checks_its_roots(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context():
            with pytest.raises(RuntimeError, match="No tensors provided"):
                dist_autograd.backward([])
            with pytest.raises(RuntimeError, match="is not a scalar"):
                dist_autograd.backward([X * 2])

    mesh.run(0, run)


def test_the_older_form_outside_of_a_context(mesh: Mesh) -> None:
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        mesh.run(0, dist_autograd.backward, [X.sum()])


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


# RRef.backward.


def make_loss(x: Any) -> Any:
    return layer(1, x).sum()


def test_backward_of_an_rref_at_a_user(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = zrpc.remote("worker1", make_loss, (X * 2,))
            assert loss.backward(context_id) is None
            return gradients_at(mesh, 0, context_id), gradients_at(mesh, 1, context_id)

    mine, there = mesh.run(0, run)
    expected = torch.autograd.grad(make_loss(X * 2), [X, W[1]])
    torch.testing.assert_close([mine[X], there[W[1]]], list(expected))
    assert X.grad is None
    assert W[1].grad is None


def test_backward_of_an_rref_at_its_owner(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = zrpc.RRef(call("worker1", make_loss, X * 2))
            loss.backward(dist_autograd_ctx_id=context_id)
            return gradients_at(mesh, 0, context_id), gradients_at(mesh, 1, context_id)

    mine, there = mesh.run(0, run)
    expected = torch.autograd.grad(make_loss(X * 2), [X, W[1]])
    torch.testing.assert_close([mine[X], there[W[1]]], list(expected))


def test_backward_of_an_rref_at_a_third_worker(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = zrpc.remote("worker1", make_loss, (X * 2,))
            call("worker2", lambda rref: rref.backward(context_id), loss)
            return [set(gradients_at(mesh, rank, context_id)) for rank in range(3)]

    assert mesh.run(0, run) == [{X}, {W[1]}, set()]


def test_backward_of_an_rref_twice(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = zrpc.remote("worker1", make_loss, (X * 2,))
            loss.backward(context_id, retain_graph=True)
            loss.backward(context_id, True)
            loss.backward(context_id)
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward(context_id)
            return gradients_at(mesh, 0, context_id)[X]

    [expected] = torch.autograd.grad(make_loss(X * 2), [X])
    torch.testing.assert_close(mesh.run(0, run), 3 * expected)


def test_backward_of_an_rref_without_context(mesh: Mesh) -> None:
    w = leaf(3, seed=5)

    def run() -> None:
        zrpc.RRef((w**2).sum()).backward()
        user = zrpc.remote("worker1", make_loss, (X.detach(),))
        with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be"):
            user.backward()

    mesh.run(0, run)
    torch.testing.assert_close(w.grad, 2 * w.detach())


def test_rrefs_without_a_tensor_have_no_backward(mesh: Mesh) -> None:
    text = r"RRef should contain a tensor for \.backward\(\)"

    def run() -> None:
        with dist_autograd.context() as context_id:
            with pytest.raises(RuntimeError, match=text):
                zrpc.RRef([X]).backward(context_id)
            with pytest.raises(RuntimeError, match=text):
                zrpc.remote("worker1", list, ([X],)).backward(context_id)
        with pytest.raises(RuntimeError, match=text):
            zrpc.RRef("text").backward()

    mesh.run(0, run)


def test_errors_of_roots_come_from_the_owner(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context() as context_id:
            with pytest.raises(RuntimeError, match="is not a scalar"):
                zrpc.remote("worker1", torch.sin, (X,)).backward(context_id)
            with pytest.raises(RuntimeError, match="requires_grad not set on root"):
                zrpc.remote("worker1", torch.ones, (1,)).backward(context_id)
            with pytest.raises(RuntimeError, match=UNKNOWN):
                zrpc.remote("worker1", make_loss, (X,)).backward(context_id + 1)

    mesh.run(0, run)


# The end of contexts.


def test_the_end_frees_all_workers(mesh: Mesh) -> None:
    def chain(rank: Any, x: Any) -> Any:
        x = layer(rank, x)
        return call(f"worker{rank + 1}", chain, rank + 1, x) if rank < 2 else x

    def run() -> None:
        with dist_autograd.context() as context_id:
            loss = call("worker1", chain, 1, X).sum()
            assert [len(layer) for layer in layers(mesh)] == [1, 1, 1]
            dist_autograd.backward(context_id, [loss])
            assert [len(layer) for layer in layers(mesh)] == [1, 1, 1]
        assert len(layers(mesh)[0]) == 0

    mesh.run(0, run)
    assert_freed(mesh)


def test_the_end_frees_workers_that_only_others_know(mesh: Mesh) -> None:
    """Calls without tensors take a worker part too."""

    def run() -> None:
        with dist_autograd.context():
            call("worker1", call, "worker2", call, "worker1", max, 1, 2)
            until(lambda: [len(layer) for layer in layers(mesh)] == [1, 1, 1])

    mesh.run(0, run)
    assert_freed(mesh)


def test_what_a_context_held_is_freed(mesh: Mesh) -> None:
    """Activations at all workers, gradients, and messages that nobody asked for."""
    watched = []

    def watch(tensor: Any) -> Any:
        watched.append(weakref.ref(tensor))
        return tensor

    def there(x: Any) -> Any:
        return watch(watch(x) * watch(W[1] * 2)[0])

    def run() -> Any:
        with dist_autograd.context() as context_id:
            far = watch(call("worker1", there, watch(X * 2)))
            call("worker1", there, watch(X * 3))
            dist_autograd.backward(context_id, [far.sum()], retain_graph=True)
            for rank in range(2):
                for gradient in gradients_at(mesh, rank, context_id).values():
                    watch(gradient)
            del gradient, far
            return len(watched)

    assert mesh.run(0, run) > 8
    assert_freed(mesh)
    gc.collect()
    until(lambda: not any(ref() is not None for ref in watched), "all tensors are freed")


def test_without_a_pass_the_graph_is_freed(mesh: Mesh) -> None:
    watched = []

    def there(x: Any) -> Any:
        y = layer(1, x)
        watched.append(weakref.ref(y))
        watched.append(weakref.ref(x))
        return y

    def run() -> None:
        with dist_autograd.context():
            call("worker1", there, X * 2)

    mesh.run(0, run)
    assert_freed(mesh)
    settle(mesh)
    until(lambda: not any(ref() is not None for ref in watched), "all tensors are freed")


def objects() -> Any:
    """How many there are of what contexts consist of."""
    gc.collect()
    kinds = (ContextState, torch.Tensor, threading.Thread)
    found = [type(o) for o in gc.get_objects()]  # isinstance would ask what pretends to be another
    return {kind.__name__: sum(issubclass(k, kind) for k in found) for kind in kinds}


@pytest.mark.zrpc(workers=3, timeout=180)
def test_a_thousand_contexts_leave_nothing(mesh: Mesh) -> None:
    def once() -> None:
        with dist_autograd.context() as context_id:
            far = call("worker1", layer, 1, X)
            loss = (call("worker2", layer, 2, far) + far).sum()
            dist_autograd.backward(context_id, [loss])

    def many(count: Any) -> None:
        for _ in range(count):
            once()

    mesh.run(0, many, 20)
    assert_freed(mesh)
    settle(mesh)
    before = objects()
    mesh.run(0, many, 1000)
    assert_freed(mesh)
    settle(mesh)
    after = objects()
    assert after["ContextState"] == 0
    assert after["Tensor"] <= before["Tensor"] + 20
    assert after["Thread"] <= before["Thread"] + 20


def test_a_call_that_arrives_after_the_end_does_not_revive_the_context(mesh: Mesh) -> None:
    """It is held up on its way; its handler then runs in no context."""
    agent = mesh.agent(1)
    go, held, ran = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def late(x: Any) -> None:
        seen.append(x.requires_grad)
        call("worker2", layer, 2, x)
        ran.set()

    def run() -> Any:
        with dist_autograd.context():
            call("worker1", layer, 1, X)
            agent.receiver.in_io_thread(lambda: (held.set(), go.wait(SOON)))
            assert held.wait(SOON)
            return zrpc.rpc_async("worker1", here(late), (X,))

    future = mesh.run(0, run)
    until(lambda: len(layers(mesh)[0]) == 0)
    go.set()
    assert ran.wait(SOON)
    future.wait()
    settle(mesh)
    assert_freed(mesh)
    assert seen == [True]


def test_a_handler_that_outlives_its_context_does_not_revive_it(mesh: Mesh) -> None:
    go, running, done = threading.Event(), threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        running.set()
        assert go.wait(SOON)
        call("worker2", layer, 2, x)
        call("worker0", layer, 0, x)
        done.set()
        return x * 2

    def run() -> Any:
        with dist_autograd.context():
            future = zrpc.rpc_async("worker1", here(slow), (X,))
            assert running.wait(SOON)
        return future

    future = mesh.run(0, run)
    assert_freed(mesh)
    go.set()
    assert done.wait(SOON)
    assert torch.equal(future.wait().detach(), X.detach() * 2)
    settle(mesh)
    assert_freed(mesh)


def test_a_failed_pass_is_freed_too(mesh: Mesh) -> None:
    handle = W[1].register_hook(lambda g: 1 / 0)
    watched = []

    def there(x: Any) -> Any:
        y = layer(1, x)
        watched.append(weakref.ref(y))
        return y

    try:
        with pytest.raises(RuntimeError, match="Error on Node 1"):
            train(mesh, lambda: call("worker1", there, X * 2).sum())
    finally:
        handle.remove()
    assert_freed(mesh)
    settle(mesh)
    until(lambda: not any(ref() is not None for ref in watched), "all tensors are freed")
