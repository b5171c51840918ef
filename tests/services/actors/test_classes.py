"""Classes of all forms as actors."""

from __future__ import annotations

from typing import Generic, TypeVar

import pytest
import torch

import zrpc
from zrpc.actors import options_of
from zrpc.testing import Mesh

T = TypeVar("T")

pytestmark = pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20})

SIZES = [10, 300_000]


@zrpc.actor
class Box(Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []

    def add(self, item: T, *_: torch.Tensor) -> None:
        self.items.append(item)

    def all(self) -> list[T]:
        return self.items


def test_a_generic_class_with_parameters_makes_actors(caller: Mesh) -> None:
    assert options_of(Box[int]) == options_of(Box)  # so the maker numbers its calls
    box = zrpc.remote(1, Box[int])
    # In order, though small messages overtake large ones.
    futures = [box.rpc_async().add(n, torch.ones(SIZES[n % 2])) for n in range(20)]
    zrpc.wait_all(futures)
    assert box.rpc_sync().all() == list(range(20))
    box.stop()
    with pytest.raises(zrpc.RpcError, match="the actor Box on worker1 was stopped"):
        box.rpc_sync().all()
