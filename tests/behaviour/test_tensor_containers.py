"""Tensors inside of containers: what arrives."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

import zrpc as rpc
from tests.support.travel import LARGE, SMALL, back
from zrpc.testing import Mesh


class Point(NamedTuple):
    x: torch.Tensor
    label: str = "p"


Old = collections.namedtuple("Old", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    more: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestContainers:
    def test_named_tuples(self, shared: Mesh, size: int) -> None:
        received = back(Point(torch.ones(size)))
        assert type(received) is Point
        assert (received.x.sum(), received.label) == (size, "p")
        received = back(Old(1, torch.ones(size)))
        assert type(received) is Old
        assert received.y.sum() == size

    def test_dataclasses(self, shared: Mesh, size: int) -> None:
        received = back(Sample(torch.ones(size), {"a": [torch.ones(size)] * 2}))
        assert type(received) is Sample
        assert received.x.sum() == size
        assert received.more["a"][0] is received.more["a"][1]
        assert back(Frozen(torch.ones(size))).x.sum() == size

    def test_torchs_named_results(self, shared: Mesh, size: int) -> None:
        received = rpc.rpc_sync(1, torch.max, (torch.ones(2, size), 0))
        assert received.values.sum() == size
        assert type(received) is torch.return_types.max

    def test_many_tensors(self, shared: Mesh, size: int) -> None:
        received = back({i: torch.full((size // 10,), float(i)) for i in range(300)})
        assert [received[i][0].item() for i in range(300)] == list(range(300))
