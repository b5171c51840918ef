"""The memory of tensors: how many bytes travel, and who shares memory with whom."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import zrpc as rpc
from tests.support.targets import echo
from tests.support.travel import LARGE, OVERHEAD_BYTES, SMALL, back, travel
from zrpc.testing import Mesh

# -- what travels ----------------------------------------------------------------------------


def big() -> torch.Tensor:
    return torch.zeros(1000, 1000)


SENT: list[tuple[Callable[[], Any], int]] = [
    (lambda: big()[0], 1000),
    (lambda: big()[0, 0], 1),
    (lambda: big()[::10, ::10], 10_000),
    (lambda: big().diagonal(), 1000),
    (lambda: big()[0:0], 0),
    (lambda: torch.zeros(1).expand(1000, 1000), 1),
    (lambda: torch.zeros(2000).unfold(0, 1000, 1), 2000),
    (lambda: torch.nn.Parameter(big()[0]), 1000),
    (lambda: torch.zeros(1000, 1000, dtype=torch.complex64).real[0], 1000),
    (lambda: torch.eye(1000).to_sparse(), 1000 * 5),
    (lambda: torch.eye(1000).to_sparse_csr(), 1000 * 5),
    (lambda: [big()[0], big()[0]], 2000),
    (lambda: np.zeros((1000, 1000))[0], 2000),
]


def test_only_the_elements_of_a_view_travel() -> None:
    for make, elements in SENT:
        assert travel(make()) <= 4 * elements + OVERHEAD_BYTES


def test_a_shared_storage_travels_once() -> None:
    tensor = big()
    assert travel([tensor] * 10) <= tensor.nbytes + OVERHEAD_BYTES
    assert (
        travel([tensor, tensor.t(), tensor[5], tensor.view(-1)]) <= tensor.nbytes + OVERHEAD_BYTES
    )


def test_small_views_far_apart_do_not_bring_what_lies_between() -> None:
    tensor = big()
    assert travel([tensor[0], tensor[-1]]) <= 2 * 4000 + OVERHEAD_BYTES


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_view_arrives_with_a_storage_of_its_elements(shared: Mesh, size: int) -> None:
    received = back(torch.zeros(3, size)[1])
    assert received.untyped_storage().nbytes() <= size * 4 + 16


# -- sharing in one message ----------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestShared:
    def test_a_tensor_and_its_views(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(2, size)
        whole, row, turned, flat = back([tensor, tensor[1], tensor.t(), tensor.view(-1)])
        row.fill_(1)
        assert whole.sum() == turned.sum() == flat.sum() == size
        whole.fill_(2)
        assert row.sum() == 2 * size
        assert tensor.sum() == 0

    def test_views_of_other_dtypes(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size, dtype=torch.complex64)
        whole, real, integers = back([tensor, tensor.real, tensor.view(torch.int32)])
        real.fill_(1)
        assert whole.sum() == size
        assert integers.count_nonzero() == size

    def test_across_args_and_kwargs(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size)
        assert rpc.rpc_sync(1, shares, (tensor, [tensor[1:]]), {"z": {"a": tensor}})

    def test_storages(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size)
        received, storage = back([tensor, tensor.untyped_storage()])
        assert storage.nbytes() == 4 * size
        received.fill_(1)
        assert storage[2] == 128  # of the float 1.0


def shares(x: torch.Tensor, y: list[torch.Tensor], z: dict[str, torch.Tensor]) -> bool:
    x.fill_(1)
    return bool(y[0].all() and z["a"].all())


# -- private and writable --------------------------------------------------------------------


def fill(tensor: Any) -> Any:
    tensor[...] = 7
    return tensor


_kept = {size: torch.zeros(size) for size in (SMALL, LARGE)}
_kept_arrays = {size: np.zeros(size) for size in (SMALL, LARGE)}


def kept(size: int, array: bool) -> Any:
    return (_kept_arrays if array else _kept)[size]


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_either_side_writes_the_other_does_not_see(shared: Mesh, make: Any, size: int) -> None:
    for to in (0, 1):
        mine = make(size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            received = rpc.rpc_sync(to, fill, (mine,))
        assert (received == 7).all()
        assert (mine == 0).all()
        received = rpc.rpc_sync(to, kept, (size, make is np.zeros))
        received[...] = 5
        assert (received == 5).all()
        assert (kept(size, make is np.zeros) == 0).all()
        futures = []
        for i in range(20):
            mine[...] = i
            futures.append(rpc.rpc_async(to, echo, (mine,)))
        mine[...] = -1  # after the calls
        for i, future in enumerate(futures):
            assert (future.wait() == i).all()
