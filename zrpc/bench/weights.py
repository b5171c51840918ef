"""Workloads: versions of a model that one worker pushes, and others load."""

from __future__ import annotations

import torch

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.sampling import Sample
from zrpc.bench.session import Session

__all__ = ["NAME", "to_subscribers"]

NAME = "benchmark"
_ELEMENT_BYTES = 4


def to_subscribers(session: Session, size: int) -> Sample:
    """Pushes a version, which all other workers load into models of their own.

    A library without published weights sends the model by one call, and its workers copy it.
    """
    rpc, others = session.rpc, session.rpc.group(session.others)
    weight = torch.ones(session.sampling.scaled(size // _ELEMENT_BYTES))
    if session.participant != "zrpc":

        def sent() -> None:
            rpc.rpc_sync(others, targets.load, args=(weight,))

        return session.sampling.time(sent)
    with rpc.nn.publish(NAME, {"weight": weight}) as published:

        def once() -> None:
            version, number = published.push(), weight.numel()
            found = rpc.rpc_sync(others, targets.load_version, args=(NAME, number, version))
            check("the versions", found, [version] * (session.workers - 1))

        sample = session.sampling.time(once)
        rpc.rpc_sync(others, targets.unsubscribe)
    return sample
