"""One worker sets up data flow among others by RRefs alone, and sees none of the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
from tests.services.rref.tracked import assert_empty
from zrpc.testing import Mesh

ELEMENTS = 250_000  # a million bytes


def produce(seed: Any) -> Any:
    return torch.full((ELEMENTS,), float(seed))


def combine(first: Any, second: Any) -> Any:
    """Fetches both from wherever they are."""
    return first.to_here() + second.to_here()


def total(rref: Any) -> Any:
    return rref.to_here().sum().item()


class Received:
    """Counts the bytes that arrive at a worker, by listening at its inbox."""

    def __init__(self, agent: Any) -> None:
        self.bytes = 0
        receive = agent.network.receive

        def count(*arguments: Any) -> Any:
            received = receive(*arguments)
            if received is not None:
                _, first, buffers = received
                self.bytes += len(first) + sum(len(bytes(buffer)) for buffer in buffers)
            return received

        agent.network.receive = count


# Without shared memory, all data comes to the inboxes.
@pytest.mark.zrpc(workers=5, options={"shared_memory": 0})
def test_no_data_goes_through_the_coordinator(mesh: Mesh) -> None:
    received = [Received(mesh.agent(rank)) for rank in range(5)]

    def coordinate() -> Any:
        first = zrpc.remote("worker1", produce, args=(1,))
        second = zrpc.remote("worker2", produce, args=(2,))
        sum_ = zrpc.remote("worker3", combine, args=(first, second))
        return zrpc.rpc_sync("worker4", total, args=(sum_,))

    assert mesh.run(0, coordinate) == 3.0 * ELEMENTS
    size = 4 * ELEMENTS
    assert received[3].bytes > 2 * size  # the counting counts
    assert received[4].bytes > size
    assert received[0].bytes < 20_000
    assert received[1].bytes < 20_000
    assert_empty(mesh)
