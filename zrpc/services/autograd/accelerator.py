"""How a backward pass goes on while an accelerator's thread computes.

torch's engine runs the nodes of an accelerator in a thread of its own, and all other nodes in the
thread that began. If that one waited for another worker while the accelerator computes, it could
not run what the accelerator's thread hands to it, for which the other worker may wait.

But a node may begin a run of its own, and its thread takes part in all runs until that one is
done. So a node that must not wait yet begins small runs that visit the accelerator's thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["visit_accelerator"]


class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns an empty tensor there, so that the node runs in that thread."""
        return torch.empty(0, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Returns an empty gradient."""
        return torch.empty(0, device="cpu"), None


def visit_accelerator() -> bool:
    """Runs nodes that are ready for this thread while the accelerator's thread is visited.

    Called by a node. Returns False if this process has no accelerator.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return False
    with torch.enable_grad():
        start = torch.empty(0, device="cpu", requires_grad=True)
        end = _Visit.apply(start, device)  # type: ignore[no-untyped-call]
    torch.autograd.grad(end, start, torch.empty(0, device=device))
    return True
