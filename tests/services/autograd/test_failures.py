"""Calls that fail hold up no pass; and a pass that fails is an error for who asked for it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    Held,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    layer,
    local_gradients,
    step,
    train,
)
from tests.support.gates import Gate
from tests.support.identity import here
from tests.support.waiting import SOON, until
from zrpc.agent.current import find_agent
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=30)


# Calls that fail.


class NotRebuilt:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not rebuilt on purpose")


def fail(x: Any) -> None:
    layer(1, x)
    raise KeyError("on purpose")


FAILING: list[Any] = [
    ("on purpose", lambda x: call("worker1", fail, x)),
    ("on purpose", lambda x: call("worker1", call, "worker2", fail, x)),
    ("pickle", lambda x: call("worker1", lambda y: (layer(1, y), threading.Lock()), x)),
    ("pickle", lambda x: call("worker1", layer, threading.Lock(), x)),
    # The tensors have arrived when the rest is found to be broken.
    ("not rebuilt on purpose", lambda x: call("worker1", layer, NotRebuilt(x), x)),
]


def test_calls_that_failed_or_that_nobody_waits_for(mesh: Mesh) -> None:
    def fail_all(x: Any) -> None:
        for text, failing in FAILING:
            with pytest.raises((RuntimeError, KeyError), match=text):
                failing(x)
        future = zrpc.rpc_async("worker1", here(lambda x: NotRebuilt(layer(1, x))), (x,))
        for _ in range(2):  # the same error each time
            with pytest.raises(RuntimeError, match="not rebuilt on purpose"):
                future.wait()
        zrpc.rpc_async("worker1", here(layer), (1, x))
        zrpc.remote("worker2", here(layer), (2, x))

    def model() -> Any:
        x = X.sin()
        if find_agent() is not None:
            fail_all(x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_the_result_of_a_call_whose_timeout_passed_comes_during_a_pass(mesh: Mesh) -> None:
    gate, done = Gate(), threading.Event()

    def slow(x: Any) -> Any:
        y = gate.wait_inside(layer(1, x))
        done.set()
        return y

    def finish(_: Any) -> None:
        gate.open()
        assert done.wait(SOON)

    def model() -> Any:
        x = X.sin()
        if find_agent() is not None:
            x.register_hook(finish)
            with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
                zrpc.rpc_sync("worker1", here(slow), (x,), timeout=0.1)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


# Passes that fail.


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> None:
        raise ValueError("broken on purpose")


def gated(gate: Gate, x: torch.Tensor) -> torch.Tensor:
    """Changes nothing; the backward pass waits at the gate."""
    y = x * 1
    y.register_hook(lambda _: gate.wait_inside())
    return y


def chain(rank: int, broken: int | None, x: Any) -> Any:
    """Through the workers in order, and back."""
    x = layer(rank, x)
    if rank == broken:
        x = Broken.apply(x)
    if rank < 2:
        x = x + call(f"worker{rank + 1}", chain, rank + 1, broken, x)
    return x * 2


def assert_usable(mesh: Mesh) -> None:
    assert_freed(mesh)
    assert_as_local(mesh, lambda: chain(0, None, X).sum(), LEAVES)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_backward_or_a_hook_that_raises(mesh: Mesh, rank: int) -> None:
    def fail(gradient: Any) -> None:
        raise ValueError("hook on purpose")

    error = RuntimeError if rank else ValueError
    where = f"(?s)Error on Node {rank}: .*" if rank else "^"
    with pytest.raises(error, match=f"{where}broken on purpose"):
        train(mesh, lambda: chain(0, rank, X).sum())
    with W[rank].register_hook(fail), pytest.raises(error, match=f"{where}hook on purpose"):
        train(mesh, lambda: chain(0, None, X).sum())
    assert_usable(mesh)


def test_a_failure_leaves_other_contexts_alone(caller: Mesh) -> None:
    """One pass fails while another one is in progress, at the same workers."""
    gate = Gate()

    def model() -> Any:
        return chain(0, None, call("worker1", gated, gate, X)).sum()

    good = caller.submit(0, step, caller, model)
    gate.await_entry()
    with pytest.raises(RuntimeError, match="Error on Node 2"):
        step(caller, lambda: chain(0, 2, X).sum())
    gate.open()
    [expected] = local_gradients(lambda: chain(0, None, X).sum(), [W[2]])
    torch.testing.assert_close(good.result(SOON)[W[2]], expected)
    assert_usable(caller)


def test_a_worker_that_is_asked_after_the_pass_has_failed(caller: Mesh) -> None:
    """It neither runs its part, nor waits for gradients that will not come."""
    part = Held(caller, Kind.BACKWARD, 0, 2)

    def there(x: Any) -> Any:
        return Broken.apply(layer(1, call("worker2", layer, 2, x)))

    with dist_autograd.context() as context_id:
        loss = call("worker1", there, X).sum()
        with pytest.raises(RuntimeError, match=r"(?s)Error on Node 1: .*broken on purpose"):
            dist_autograd.backward(context_id, [loss])
        assert part.any.is_set()
        part.release()
    assert_usable(caller)


def test_a_context_that_ends_during_a_pass(caller: Mesh) -> None:
    """The pass of another thread ends, and leaves no thread behind that waits."""
    gate = Gate()
    with dist_autograd.context() as context_id:
        loss = call("worker1", gated, gate, X.sin()).sum()
        future: Future[Any] = caller.submit(0, dist_autograd.backward, context_id, [loss])
        gate.await_entry()
    assert_freed(caller)
    gate.open()
    future.exception(SOON / 4)
    assert_usable(caller)


# A part that hangs ends with its context: nothing may need that.
_IN_TIME = 3.0


def until_no_part_runs(mesh: Mesh) -> None:
    for rank in range(len(mesh)):
        requests = mesh.agent(rank).callee.requests
        until(lambda r=requests: not r.all(), f"worker{rank} does nothing", within=_IN_TIME)


def down(rank: int, last: int, x: Any) -> Any:
    if rank == last:
        return Broken.apply(x * 2)
    return call(f"worker{rank + 1}", down, rank + 1, last, x * 2) * 2


@pytest.mark.zrpc(workers=4, timeout=30)
def test_a_pass_that_failed_ends_at_all_workers(mesh: Mesh) -> None:
    """Also at those that exchange nothing with the one where it failed; the context goes on."""
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        loss = call("worker1", down, 1, 3, X).sum()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken on purpose"):
                dist_autograd.backward(context_id, [loss], retain_graph=True)
            until_no_part_runs(mesh)
        dist_autograd.backward(context_id, [call("worker3", layer, 2, X).sum()])
    assert_freed(mesh)


def test_a_pass_that_is_interrupted_ends_at_all_workers(mesh: Mesh) -> None:
    """By Ctrl-C, where it has begun; the context goes on."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        x = X * 2
        x.register_hook(interrupt)
        # worker1 waits for the gradient of what it has sent last, and worker0 does not come to it.
        far = call("worker1", layer, 1, X * 3)
        y = call("worker1", layer, 1, far * 2)
        loss = y.sum() + call("worker2", layer, 2, x).sum()
        far.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            dist_autograd.backward(context_id, [loss])
        until_no_part_runs(mesh)
    assert_freed(mesh)


def test_a_hook_at_another_worker_that_exits(mesh: Mesh) -> None:
    def exit_hook(_: Any) -> None:
        raise SystemExit(3)

    def there(x: Any) -> Any:
        y = layer(1, x)
        y.register_hook(exit_hook)
        return y

    with pytest.raises(RuntimeError, match="Error on Node 1"):
        mesh.submit(0, step, mesh, lambda: call("worker1", there, X).sum()).result(_IN_TIME)
    until_no_part_runs(mesh)
    assert_freed(mesh)
