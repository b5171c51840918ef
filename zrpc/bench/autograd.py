"""Workloads: training steps whose model is on several workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.session import PEER, Sample, Session

BATCH_SIZE = 32


def step(session: Session, width: int) -> Sample:
    """Runs one layer here and one twice on the peer, forward and backward."""
    return session.sampling.time(training_step(session, width))


def training_step(session: Session, width: int) -> Callable[[], object]:
    """Returns a function that runs the step once; it has run once already."""
    rpc_sync, dist_autograd = session.rpc.rpc_sync, session.library.autograd
    inputs = torch.ones(BATCH_SIZE, width)

    def once(read_gradients: bool = False) -> float:
        with dist_autograd.context() as context_id:
            hidden = targets.layer(inputs)
            hidden = rpc_sync(PEER, targets.layer, args=(hidden,))
            hidden = rpc_sync(PEER, targets.layer, args=(hidden,))
            dist_autograd.backward(context_id, [hidden.sum()])
            if not read_gradients:
                return 0.0
            remote: float = rpc_sync(PEER, targets.gradient_sum, args=(context_id, width))
            return min(remote, targets.gradient_sum(context_id, width))

    check("the gradients on both workers to be above 0", once(read_gradients=True) > 0, True)
    return once


def experts(session: Session, calls: int, width: int) -> Sample:
    """Calls layers on all other workers in turn, as a mixture of experts does, then backward."""
    rpc_async, dist_autograd = session.rpc.rpc_async, session.library.autograd
    tokens = torch.ones(calls, width, requires_grad=True)

    def once(read_gradients: bool = False) -> float:
        with dist_autograd.context() as context_id:
            routed = zip(tokens.unbind(), itertools.cycle(session.others), strict=False)
            futures = [rpc_async(to, targets.layer, args=(token,)) for token, to in routed]
            loss = torch.stack([future.wait() for future in futures]).sum()
            dist_autograd.backward(context_id, [loss])
            if not read_gradients:
                return 0.0
            args = (context_id, width)
            sums = [rpc_async(to, targets.gradient_sum, args=args) for to in session.others]
            gradient = dist_autograd.get_gradients(context_id)[tokens]
            own = gradient.abs().sum(1).min().item()
            least: float = min(own, *(each.wait() for each in sums))
            return least

    check("the gradients on all workers to be above 0", once(read_gradients=True) > 0, True)
    return session.sampling.time(once)
