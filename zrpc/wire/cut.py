"""Tensors that require grad although their gradient can't be sent to where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from zrpc.errors import RpcError, raised_again


def cut_off(tensors: Sequence[torch.Tensor], error: RpcError) -> tuple[torch.Tensor, ...]:
    """Returns tensors with the same values, whose use in a backward pass raises an error.

    Args:
        tensors: they require no grad.
        error: the error.
    """
    with torch._C._InferenceMode(False):  # enables grad as well
        cut: tuple[torch.Tensor, ...] = _Cut.apply(
            torch.empty(0, requires_grad=True), tensors, error
        )
    return cut


class _Cut(torch.autograd.Function):
    """``(token, tensors, error) -> tensors``: they require grad, but no gradient passes."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, tensors: Sequence[torch.Tensor], error: RpcError
    ) -> Any:
        ctx.error = error
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> NoReturn:
        raise raised_again(ctx.error)
