"""Optimizers that run on the workers that own the parameters."""

from zrpc.optim.distributed import DistributedOptimizer, clip_grad_norm_

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]
