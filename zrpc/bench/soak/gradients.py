"""Actions: forward and backward passes through several workers, and optimizer steps."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

import zrpc
import zrpc.autograd as dist_autograd
from zrpc.bench.soak.calls import same
from zrpc.bench.soak.client import Action, Client
from zrpc.optim import DistributedOptimizer

_WIDTH = 6
# This worker's weights, by seed, while a context uses them. The lock guards the table.
_lock = threading.Lock()
_weights: dict[int, torch.Tensor] = {}


def _weight(seed: int) -> torch.Tensor:
    """Returns this worker's weight for a seed. It has the same values on all workers."""
    with _lock:
        if seed not in _weights:
            _weights[seed] = _new_weight(seed)
        return _weights[seed]


def _new_weight(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-3, 4, (_WIDTH, _WIDTH), generator=generator, dtype=torch.float64)
    return weight.requires_grad_()


def _forward(route: list[str], seed: int, inputs: torch.Tensor) -> torch.Tensor:
    """Applies a layer here and one on each worker of the route, and adds the inputs."""
    hidden = torch.sin(inputs @ _weight(seed))
    if route:
        hidden = zrpc.rpc_sync(route[0], _forward, (route[1:], seed, hidden))
    return hidden + inputs


def _forward_here(route: list[str], weights: dict[str, torch.Tensor], x: Any) -> torch.Tensor:
    """Does what `_forward` does, in this process only."""
    hidden = torch.sin(x @ weights[route[0]])
    if route[1:]:
        hidden = _forward_here(route[1:], weights, hidden)
    return hidden + x  # type: ignore[no-any-return]


def _gradient(context_id: int, seed: int) -> torch.Tensor | None:
    """Returns the gradient of this worker's weight in a context, and drops the weight."""
    with _lock:
        weight = _weights.pop(seed)
    return dist_autograd.get_gradients(context_id).get(weight)


def backward(client: Client) -> None:
    """Compares gradients through several workers with those of one process."""
    seed, route = client.rng.getrandbits(40), client.random_route(4)
    inputs = _new_weight(seed + 1)
    calls = client.random_int(1, 2)
    try:
        with dist_autograd.context() as context_id:
            loss = _loss(
                [
                    zrpc.rpc_sync(route[0], _forward, (route[1:], seed, inputs * (i + 1)))
                    for i in range(calls)
                ]
            )
            dist_autograd.backward(context_id, [loss])
            found = {
                peer: zrpc.rpc_sync(peer, _gradient, (context_id, seed)) for peer in set(route)
            }
            own = dist_autograd.get_gradients(context_id)[inputs]
            client.expect("grad", None, inputs.grad)
    except zrpc.RpcError:
        _drop_weights(route, seed)
        raise
    weights = {peer: _new_weight(seed) for peer in route}
    local_loss = _loss([_forward_here(route, weights, inputs * (i + 1)) for i in range(calls)])
    expected = torch.autograd.grad(local_loss, [inputs, *(weights[peer] for peer in found)])
    _close("the gradient here", expected[0], own)
    for (peer, gradient), right in zip(found.items(), expected[1:], strict=True):
        _close(f"the gradient on {peer}", right, gradient)


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([output.sum() for output in outputs]).sum()


def _drop_weights(route: list[str], seed: int) -> None:
    """Drops the weights of a pass that was cut off, on all workers that live."""
    for peer in set(route):
        with contextlib.suppress(zrpc.WorkerDied):
            zrpc.rpc_sync(peer, _drop_weight, (seed,))


def _drop_weight(seed: int) -> None:
    with _lock:
        _weights.pop(seed, None)


def abandon(client: Client) -> None:
    """Runs a forward pass in a context, and no backward pass."""
    seed, route = client.rng.getrandbits(40), client.random_route(3)
    inputs = _new_weight(seed + 1)
    try:
        with dist_autograd.context():
            found = zrpc.rpc_sync(route[0], _forward, (route[1:], seed, inputs))
            client.expect("requires_grad", True, found.requires_grad)
    finally:
        _drop_weights(route, seed)
    _close(
        "forward", _forward_here(route, {peer: _new_weight(seed) for peer in route}, inputs), found
    )


def optimize(client: Client) -> None:
    """Compares optimizer steps over parameters on two workers with those of one process."""
    seed, owners = client.rng.getrandbits(40), [client.random_peer(), client.random_peer()]
    momentum, steps = client.rng.choice([0.0, 0.9]), client.random_int(1, 3)
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
        _close(f"the parameter on {owners[i]}", here[i], rref.to_here())


def _apply(rref: Any, inputs: torch.Tensor) -> torch.Tensor:
    return torch.sin(inputs @ rref.local_value())


def _close(what: str, expected: torch.Tensor, found: torch.Tensor | None) -> None:
    """Does what `same` does, but allows for sums in a different order."""
    if found is not None and torch.allclose(expected, found, rtol=1e-9, atol=1e-9):
        return
    same(what, expected, torch.empty(0) if found is None else found)


ACTIONS: list[tuple[Action, int]] = [(backward, 6), (abandon, 2), (optimize, 3)]


def forget() -> None:
    """Drops the weights of passes that were cut off."""
    with _lock:
        _weights.clear()
