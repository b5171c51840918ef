"""Actions: forward and backward through several workers, and steps of optimizers."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.optim import DistributedOptimizer
from zrpc.soak.calls import same
from zrpc.soak.lane import Action, Lane

__all__ = ["ACTIONS"]

_WIDTH = 6
# Each worker's own weights, by seed, while a context uses them. The lock guards the table.
_lock = threading.Lock()
_weights: dict[int, torch.Tensor] = {}


def _weight(seed: int) -> torch.Tensor:
    """This worker's weight of that seed, the same at all workers, but each has its own."""
    with _lock:
        if seed not in _weights:
            _weights[seed] = _new_weight(seed)
        return _weights[seed]


def _new_weight(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-3, 4, (_WIDTH, _WIDTH), generator=generator, dtype=torch.float64)
    return weight.requires_grad_()


def _forward(way: list[str], seed: int, inputs: torch.Tensor) -> torch.Tensor:
    """A layer here, then those of the rest of the way, and the inputs added."""
    hidden = torch.sin(inputs @ _weight(seed))
    if way:
        hidden = zrpc.rpc_sync(way[0], _forward, (way[1:], seed, hidden))
    return hidden + inputs


def _forward_here(way: list[str], weights: dict[str, torch.Tensor], x: Any) -> torch.Tensor:
    """The same, all of it in this process."""
    hidden = torch.sin(x @ weights[way[0]])
    if way[1:]:
        hidden = _forward_here(way[1:], weights, hidden)
    result: torch.Tensor = hidden + x
    return result


def _gradient(context_id: int, seed: int) -> torch.Tensor | None:
    """The gradient of this worker's weight in a context; the weight is then forgotten."""
    with _lock:
        weight = _weights.pop(seed)
    return dist_autograd.get_gradients(context_id).get(weight)


def backward(lane: Lane) -> None:
    """Gradients through some workers, compared with those of one process."""
    seed, way = lane.rng.getrandbits(40), lane.way(4)
    inputs = _new_weight(seed + 1)
    calls = lane.whole(1, 2)
    try:
        with dist_autograd.context() as context_id:
            loss = _loss(
                [
                    zrpc.rpc_sync(way[0], _forward, (way[1:], seed, inputs * (i + 1)))
                    for i in range(calls)
                ]
            )
            dist_autograd.backward(context_id, [loss])
            found = {peer: zrpc.rpc_sync(peer, _gradient, (context_id, seed)) for peer in set(way)}
            own = dist_autograd.get_gradients(context_id)[inputs]
            lane.expect("grad", None, inputs.grad)
    except zrpc.RpcError:
        _forget_everywhere(way, seed)
        raise
    weights = {peer: _new_weight(seed) for peer in way}
    here = _loss([_forward_here(way, weights, inputs * (i + 1)) for i in range(calls)])
    expected = torch.autograd.grad(here, [inputs, *(weights[peer] for peer in found)])
    _close("the gradient here", expected[0], own)
    for (peer, gradient), right in zip(found.items(), expected[1:], strict=True):
        _close(f"the gradient at {peer}", right, gradient)


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([output.sum() for output in outputs]).sum()


def _forget_everywhere(way: list[str], seed: int) -> None:
    """Has the weights of a pass that was cut forgotten by those that live."""
    for peer in set(way):
        with contextlib.suppress(zrpc.WorkerDied):
            zrpc.rpc_sync(peer, _forget, (seed,))


def _forget(seed: int) -> None:
    with _lock:
        _weights.pop(seed, None)


def abandon(lane: Lane) -> None:
    """A context that goes forward, and never backward."""
    seed, way = lane.rng.getrandbits(40), lane.way(3)
    inputs = _new_weight(seed + 1)
    try:
        with dist_autograd.context():
            found = zrpc.rpc_sync(way[0], _forward, (way[1:], seed, inputs))
            lane.expect("requires_grad", True, found.requires_grad)
    finally:
        _forget_everywhere(way, seed)
    _close("forward", _forward_here(way, {peer: _new_weight(seed) for peer in way}, inputs), found)


def optimize(lane: Lane) -> None:
    """Steps of an optimizer over parameters at two workers, compared with those of one."""
    seed, owners = lane.rng.getrandbits(40), [lane.peer(), lane.peer()]
    momentum, steps = lane.rng.choice([0.0, 0.9]), lane.whole(1, 3)
    rrefs = [zrpc.remote(to, _new_weight, (seed + i,)) for i, to in enumerate(owners)]
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1, momentum=momentum)
    here = [_new_weight(seed + i) for i in range(len(owners))]
    expected = torch.optim.SGD(here, lr=0.1, momentum=momentum)
    inputs = _new_weight(seed + 7).detach()
    for _ in range(steps):
        with dist_autograd.context() as context_id:
            first, second = (zrpc.rpc_async(rref.owner(), _apply, (rref, inputs)) for rref in rrefs)
            loss = (first.wait() * second.wait()).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        expected.zero_grad()
        (torch.sin(inputs @ here[0]) * torch.sin(inputs @ here[1])).sum().backward()  # type: ignore[no-untyped-call]
        expected.step()
    for i, rref in enumerate(rrefs):
        _close(f"the parameter at {owners[i]}", here[i], rref.to_here())


def _apply(rref: Any, inputs: torch.Tensor) -> torch.Tensor:
    return torch.sin(inputs @ rref.local_value())


def _close(what: str, expected: torch.Tensor, found: torch.Tensor | None) -> None:
    """As `same`, but sums may have been added up in another order."""
    if found is not None and torch.allclose(expected, found, rtol=1e-9, atol=1e-9):
        return
    same(what, expected, torch.empty(0) if found is None else found)


ACTIONS: list[tuple[Action, int]] = [(backward, 6), (abandon, 2), (optimize, 3)]


def forget() -> None:
    """Lets go of the weights of passes that were cut."""
    with _lock:
        _weights.clear()
