"""Parameters on other workers, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.support.identity import emptied

Parameter = zrpc.RRef[torch.Tensor]

# The workers are threads of this process: each takes its parameters from here.
PARAMETERS: dict[str, torch.Tensor] = emptied({})


def refer(name: str) -> Parameter:
    return zrpc.RRef(PARAMETERS[name])


def make(name: str, owner: int, value: tuple[float, ...] = (1.0, 2.0, 3.0)) -> Parameter:
    """Makes a parameter on a worker, and returns an RRef of it."""
    PARAMETERS[name] = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    return zrpc.rpc_sync(f"worker{owner}", refer, (name,))


def use(rref: Parameter, factor: float) -> torch.Tensor:
    return (rref.local_value() * factor).sum()


def run_backward(context_id: int, rrefs: list[Parameter], factor: float = 1.0) -> None:
    """Makes ``factor`` the gradient of each element of each parameter."""
    losses = [zrpc.rpc_sync(rref.owner(), use, (rref, factor)) for rref in rrefs]
    dist_autograd.backward(context_id, losses)


def gradients(rref: Parameter, context_id: int) -> Any:
    return zrpc.rpc_sync(rref.owner(), gradient_here, (rref, context_id))


def gradient_here(rref: Parameter, context_id: int) -> torch.Tensor | None:
    return dist_autograd.get_gradients(context_id).get(rref.local_value())
