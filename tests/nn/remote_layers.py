"""Modules that the tests make on other workers."""

from __future__ import annotations

from typing import Any

import torch

import zrpc
from tests.support.identity import emptied
from zrpc.nn import RemoteModule

X = torch.arange(6.0).view(2, 3) / 3

# Calls of hooks. The workers are threads of this process.
CALLS: list[tuple[str, Any]] = emptied([])
FOUND: list[torch.nn.Module] = emptied([])


def value(module: RemoteModule) -> Any:
    """Returns the module itself, which is in this process too."""
    zrpc.rpc_sync(module.on, find, (module.module_rref,))
    return FOUND.pop()


def find(rref: zrpc.RRef[torch.nn.Module]) -> None:
    FOUND.append(rref.local_value())


class Scale(torch.nn.Module):
    """A module with parameters of its own, a submodule, a buffer and modes."""

    def __init__(self, factor: float = 1.0, *, size: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.linear = torch.nn.Linear(size, size)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
        self.calls += 1
        out = self.linear(x) * self.factor + bias
        return out if self.training else out * 0

    def where(self) -> str:
        return zrpc.get_worker_info().name


class Frozen(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class FailsToBegin(torch.nn.Module):
    def __init__(self) -> None:
        raise OSError("no module on purpose")


def no_module() -> list[int]:
    return [1]


def double_(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter *= 2
