"""The two nodes that an autograd graph has where it crosses from one worker to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

__all__ = ["receive", "send"]

Gradients = Sequence[torch.Tensor | None]


Await = Callable[[], Gradients]
Back = Callable[[Gradients], None]


class Send(torch.autograd.Function):
    """``(token, wait, *tensors) -> token``: the tensors leave this worker."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, wait: Await, *tensors: torch.Tensor) -> torch.Tensor:
        """Makes the next token."""
        ctx.wait = wait
        ctx.set_materialize_grads(False)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor | None) -> Any:
        """Gives the gradients that the receiver has sent back."""
        return torch.empty(0), None, *ctx.wait()


class Receive(torch.autograd.Function):
    """``(token, back, tensors) -> (token, *tensors)``: tensors have come to this worker.

    They are no inputs of the node, so that they are no views of inputs and may be changed in
    place.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, token: torch.Tensor, back: Back, tensors: list[torch.Tensor]
    ) -> Any:
        """Makes the next token, and the tensors part of the graph."""
        ctx.back = back  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return token.new_empty(0), *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor | None, *gradients: torch.Tensor | None) -> Any:
        """Sends the gradients back."""
        ctx.back(gradients)
        return torch.empty(0), None, None


def send(token: torch.Tensor, wait: Await, *tensors: torch.Tensor) -> torch.Tensor:
    """Appends a `Send` node to a chain; returns the chain's new end."""
    end: torch.Tensor = Send.apply(token, wait, *tensors)  # type: ignore[no-untyped-call]
    return end


def receive(token: torch.Tensor, back: Back, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Appends a `Receive` node to a chain; returns the chain's new end, and the tensors."""
    return list(Receive.apply(token, back, tensors))  # type: ignore[no-untyped-call]
