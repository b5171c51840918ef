"""Workload: a training step whose model is spread over two workers."""

from __future__ import annotations

import torch

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.effort import Sample
from zrpc.bench.session import PEER, Session

__all__ = ["BATCH", "step"]

BATCH = 32


def step(session: Session, width: int) -> Sample:
    """A layer here and twice one at the peer, forward and backward."""
    rpc_sync, dist_autograd = session.rpc.rpc_sync, session.autograd
    inputs = torch.ones(BATCH, width)

    def once(look: bool = False) -> float:
        with dist_autograd.context() as context_id:
            hidden = targets.layer(inputs)
            hidden = rpc_sync(PEER, targets.layer, args=(hidden,))
            hidden = rpc_sync(PEER, targets.layer, args=(hidden,))
            dist_autograd.backward(context_id, [hidden.sum()])
            if not look:
                return 0.0
            there: float = rpc_sync(PEER, targets.gradient_sum, args=(context_id, width))
            return min(there, targets.gradient_sum(context_id, width))

    check("the gradients on both workers to be above 0", once(look=True) > 0, True)
    return session.effort.time(once)
