"""Workloads: versions of a model that one worker pushes, and others load."""

from __future__ import annotations

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.sampling import Sample
from zrpc.bench.session import Session

__all__ = ["ELEMENT_BYTES", "NAME", "to_subscribers"]

NAME = "benchmark"
ELEMENT_BYTES = 4


def to_subscribers(session: Session, size: int) -> Sample:
    """Pushes a version, which all other workers load into models of their own.

    A library without published weights sends the model by one call, and its workers copy it.
    """
    rpc, others = session.rpc, session.rpc.group(session.others)
    number = session.sampling.scaled(size // ELEMENT_BYTES)
    model = targets.new_model(number)
    if session.participant != "zrpc":

        def sent() -> None:
            rpc.rpc_sync(others, targets.load, args=(model,))

        return session.sampling.time(sent)
    with rpc.nn.publish(NAME, model) as published:

        def once() -> None:
            version = published.push()
            found = rpc.rpc_sync(others, targets.load_version, args=(NAME, number, version))
            check("the versions", found, [version] * (session.workers - 1))

        sample = session.sampling.time(once)
        rpc.rpc_sync(others, targets.unsubscribe)
    return sample
