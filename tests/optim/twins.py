"""Parameters on other workers and their gradients; and equal ones here, with steps over both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.support.identity import emptied
from zrpc.optim import DistributedOptimizer

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


STEPS = 4

Loss = Callable[[torch.Tensor, int], torch.Tensor]


def drawn(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def loss_of(weight: torch.Tensor, step: int) -> torch.Tensor:
    scale = torch.linspace(0.5, 2, 12, dtype=torch.float64).view(4, 3)
    return ((weight * scale * (step + 1)).sin() ** 2).sum()


def rows_of(weight: torch.Tensor, step: int) -> torch.Tensor:
    rows = torch.nn.functional.embedding(torch.tensor([0, 2, step % 4]), weight, sparse=True)
    return (rows**2 * (step + 1)).sum()


def at_owner(rref: Parameter, fn: Loss, step: int) -> torch.Tensor:
    return fn(rref.local_value(), step)


class Twins:
    """An optimizer over parameters of several workers, and the same over equal ones here.

    Args:
        optimizer_class: of both optimizers.
        owners: the workers that have a parameter each.
        *args: of both optimizers.
        groups: returns the groups of parameters.
        **options: of both optimizers.

    Attributes:
        rrefs, weights: the parameters.
        distributed, local: the optimizers.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        owners: list[int],
        *args: Any,
        groups: Callable[[list[Any]], Any] = list,
        **options: Any,
    ) -> None:
        self._class = optimizer_class
        names = {f"w{i}": owner for i, owner in enumerate(owners)}
        PARAMETERS.update({name: drawn(i).requires_grad_() for i, name in enumerate(names)})
        self.rrefs = [zrpc.rpc_sync(f"worker{at}", refer, (name,)) for name, at in names.items()]
        self.weights = [drawn(i).requires_grad_() for i in range(len(owners))]
        self.distributed = DistributedOptimizer(
            optimizer_class, groups(self.rrefs), *args, **options
        )
        self.local = optimizer_class(groups(self.weights), *args, **options)

    @property
    def first_groups(self) -> list[dict[str, Any]]:
        """The first group of both optimizers."""
        return [optimizer.param_groups[0] for optimizer in (self.distributed, self.local)]

    def set(self, **options: Any) -> None:
        """Sets options of the first groups."""
        for group in self.first_groups:
            group.update(options)

    def save_and_load(self, path: Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Goes on with another distributed optimizer, by the state of the last; returns it."""
        state = self.distributed.state_dict()
        torch.save(state, path)
        self.distributed = DistributedOptimizer(self._class, self.rrefs, *args, **options)
        self.distributed.load_state_dict(torch.load(path, weights_only=True))
        return state

    def step(self, number: int, of: slice = slice(None), fn: Loss = loss_of) -> None:
        """Steps with both, over all or some parameters, and checks that all are equal then."""
        with dist_autograd.context() as context_id:
            futures = [
                zrpc.rpc_async(rref.owner(), at_owner, (rref, fn, number))
                for rref in self.rrefs[of]
            ]
            found: Any = sum(future.wait() for future in futures)
            dist_autograd.backward(context_id, [found])
            self.distributed.step(context_id)
        self.local.zero_grad()
        loss: Any = sum(fn(weight, number) for weight in self.weights[of])
        loss.backward()
        self.local.step(*([lambda: loss] if isinstance(self.local, torch.optim.LBFGS) else []))
        assert found.item() == pytest.approx(loss.item())
        for i, weight in enumerate(self.weights):
            torch.testing.assert_close(PARAMETERS[f"w{i}"].detach(), weight.detach())
            assert PARAMETERS[f"w{i}"].grad is None

    def run(self, scheduler: Callable[[Any], Any] | None = None, fn: Loss = loss_of) -> None:
        """Steps several times, each time followed by that of a scheduler."""
        schedulers = [scheduler(o) for o in (self.distributed, self.local)] if scheduler else []
        for number in range(STEPS):
            self.step(number, fn=fn)
            for each in schedulers:
                each.step()
        assert not torch.equal(self.weights[0].detach(), drawn(0)), "expected a change"
        distributed, local = ({**group, "params": None} for group in self.first_groups)
        assert distributed == local
