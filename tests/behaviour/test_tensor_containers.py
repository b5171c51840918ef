"""NumPy arrays, and tensors inside of containers: what arrives."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
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


ARRAYS: list[Any] = [
    np.arange(SMALL),
    np.arange(LARGE),
    np.arange(LARGE).reshape(100, -1).T,
    np.asfortranarray(np.arange(LARGE).reshape(100, -1)),
    np.arange(LARGE)[::3],
    np.float32(1.5),
    np.array(5),
    np.empty((0, 3)),
    np.array(["a", "bc"] * LARGE),
    np.array([1, "a", None], dtype=object),
    np.array([(1, 2.0)] * LARGE, dtype=[("a", "i4"), ("b", "f8")]),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.arange(LARGE).astype(">i4"),
    np.ma.masked_array([1, 2], [True, False]),
]


def test_numpy(shared: Mesh) -> None:
    for sent in ARRAYS:
        received = back(sent)
        assert type(received) is type(sent)
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(received, sent)


def test_read_only_array(shared: Mesh) -> None:
    for size in (SMALL, LARGE):
        sent = np.arange(size)
        sent.flags.writeable = False
        received = back(sent)
        np.testing.assert_array_equal(received, sent)
        assert not received.flags.writeable
